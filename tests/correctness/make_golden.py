"""Writes golden.npz: greedy continuations by HF transformers in float32, with its distributions.

pip install -e '.[bench]'
python -P tests/correctness/make_golden.py SmolLM2-135M-Instruct.Q4_1.gguf tests/correctness/golden.npz

Per prompt: the ids of our tokenizer (transformers' own, made from the GGUF file, does not split digits), 32 greedy
tokens, and for each of them the TOP most likely tokens with their log-probabilities.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers  # pyright: ignore[reportMissingImports]

from kvpilot.agent.bench.corpus import read_texts
from kvpilot.engine.model.load import read_checkpoint

TOP = 64
NUM_TOKENS = 32

CHATS = {
    "fact": "What is the capital of France, and which river flows through it? Answer in two sentences.",
    "arithmetic": "A shop sells 17 pens at 3.25 each and 4 books at 12.50 each. What is the total? Show each step.",
    "list": "List five things to pack for a rainy weekend in the mountains, one per line.",
    "code": "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "translate": "Translate to French: 'The meeting was moved to Thursday because of the storm.'",
    "json": 'Give me a JSON object with the keys "name", "age" and "languages" for a made-up engineer.',
    "poem": "Write a short poem about an old lighthouse that misses the sea.",
    "unicode": "R\u00e9sum\u00e9: \u00bfqu\u00e9 significa \u201cna\u00efvet\u00e9\u201d? "
    "\u6771\u4eac \u2192 \U0001f5fc Explain.",
}
RAW = {  # completions without a chat template: text name -> characters
    "emma": 900,
    "persuasion": 2400,
    "cpython_heapq": 700,
    "cpython_textwrap": 1800,
}


def main(model_path: str, out: str) -> None:
    path = Path(model_path)
    tokenizer = read_checkpoint(path).load_tokenizer()
    texts = read_texts()
    prompts = {
        name: tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": text}]))
        for name, text in CHATS.items()
    }
    prompts |= {name: tokenizer.encode(texts[name][:length]) for name, length in RAW.items()}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent),
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    arrays: dict[str, np.ndarray] = {}
    for name, prompt in prompts.items():
        tokens, logp_NV = greedy(model, prompt)
        top = logp_NV.topk(TOP)
        arrays[f"{name}.prompt"] = np.array(prompt, dtype=np.uint16)
        arrays[f"{name}.tokens"] = np.array(tokens, dtype=np.uint16)
        arrays[f"{name}.top_ids"] = top.indices.numpy().astype(np.uint16)
        arrays[f"{name}.top_logprobs"] = top.values.numpy().astype(np.float32)
        print(name, len(prompt), repr(tokenizer.decode(tokens)))
    np.savez_compressed(out, **arrays)  # pyright: ignore[reportArgumentType]


@torch.inference_mode()
def greedy(model: transformers.PreTrainedModel, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """NUM_TOKENS greedy tokens, the end token like any other, and the log-probabilities behind each."""
    tokens, rows, cache = list(prompt), [], None
    for _ in range(NUM_TOKENS):
        new = tokens if cache is None else tokens[-1:]
        output = model(torch.tensor([new]), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        rows.append(output.logits[0, -1].log_softmax(-1))
        tokens.append(int(rows[-1].argmax()))
    return tokens[len(prompt) :], torch.stack(rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
