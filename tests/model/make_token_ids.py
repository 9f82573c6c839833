"""Writes token_ids.json: the ids that llama.cpp gives to varied texts, the standard for our tokenizer.

pip install llama-cpp-python==0.3.36
python tests/model/make_token_ids.py SmolLM2-135M-Instruct.Q4_1.gguf > tests/model/token_ids.json
"""

import json
import sys

import llama_cpp  # pyright: ignore[reportMissingImports]

TEXTS = [
    "",
    " ",
    "   ",
    "\n",
    "\n\n\n",
    "\t\tindented",
    "Hello, world!",
    "hello world",
    " leading space",
    "trailing space ",
    "two  spaces   three",
    "3 apples",
    "I have 12345 apples and 6.02e23 atoms.",
    "a  1",
    "a   12   34",
    "x = 1\n  2\n\n   3",
    "1",
    " 1",
    "  1",
    "2024-11-29T13:45:00Z",
    "IPv4 192.168.0.1:8080, v1.2.3-rc4",
    "It's we're they've I'm you'll he'd 'S 'LL",
    "def f(x):\n    return x ** 2  # square\n",
    "for (int i = 0; i < 10; ++i) { a[i] += b[i]; }",
    '<html><body class="x">&nbsp;</body></html>',
    "SELECT * FROM t WHERE a >= 10 AND b IN ('x', 'y');",
    '{"key": [1, 2.5, null, true], "nested": {"a": "b"}}',
    "#include <stdio.h>\r\nint main() {\r\n\treturn 0;\r\n}\r\n",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u4eca\u5929\u662f2024\u5e7411\u6708\u3002",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3067\u3059\u3002",
    "\ud55c\uad6d\uc5b4 \ubb38\uc7a5 123",
    "\u0420\u0443\u0441\u0441\u043a\u0438\u0439 \u0442\u0435\u043a\u0441\u0442, 2 \u0441\u043b\u043e\u0432\u0430",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u0661\u0662\u0663",
    "\u0939\u093f\u0928\u094d\u0926\u0940 \u0967\u0968\u0969",
    "caf\u00e9 na\u00efve \u00e5ngstr\u00f6m cafe\u0301",
    "\U0001f600\U0001f680 emoji \U0001f468\u200d\U0001f469\u200d\U0001f467 family",
    "\u00bd cup, x\u00b2 + y\u00b3, \u2167, \u2460",
    "\u00a0no-break\u2003em space\u3000ideographic",
    "a\u0000b",
    "\u2019curly\u2019 \u201cquotes\u201d \u2014 dash\u2026",
    "<|im_start|>user\nhi 5<|im_end|>\n<|im_start|>assistant\n",
    "text<|im_end|>more<|endoftext|>",
    "<|im_start|><|im_end|> <|not_special|>",
    "<repo_name>x<file_sep>y",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "!!!???...---===***",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "https://example.org/a/b?c=1&d=%20#frag",
    "\u03b1\u03b2\u03b3 \u2211_{i=0}^{n} x_i \u2264 \u221e",
    "1,000,000 + 2 000 000 = 3_000_000",
    "no_space_before123 and 45after",
    "\n 1\n  2\n\t3\n",
]


def main() -> None:
    model = llama_cpp.Llama(sys.argv[1], vocab_only=True, verbose=False)
    ids = {text: model.tokenize(text.encode(), add_bos=False, special=True) for text in TEXTS}
    rows = [f"  {json.dumps(text)}: {json.dumps(tokens)}" for text, tokens in ids.items()]
    print("{\n" + ",\n".join(rows) + "\n}")


if __name__ == "__main__":
    main()
