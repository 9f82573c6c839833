"""Writes logprobs.json: greedy continuations and top-5 log-probabilities by transformers in float32.

    pip install transformers==5.24.0 accelerate gguf torch==2.13.0
    python tests/model/make_logprobs.py SmolLM2-135M-Instruct.Q4_1.gguf tests/model/token_ids.json \
        > tests/model/logprobs.json

The prompts are texts of token_ids.json, as ids: transformers' own GGUF tokenizer does not split digits.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

PROMPTS = [
    "def f(x):\n    return x ** 2  # square\n",
    "I have 12345 apples and 6.02e23 atoms.",
    "Hello, world!",
]
NUM_TOKENS = 12


def main() -> None:
    path, token_ids = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    rows = []
    for prompt in PROMPTS:
        ids, steps = list(token_ids[prompt]), []
        for _ in range(NUM_TOKENS):
            with torch.no_grad():
                logprobs = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            values, top = logprobs.topk(5)
            steps.append({"top": top.tolist(), "logprobs": [round(value, 4) for value in values.tolist()]})
            ids.append(top[0].item())
        steps_text = ",\n    ".join(json.dumps(step) for step in steps)
        rows.append(f"  {json.dumps(prompt)}: [\n    {steps_text}\n  ]")
    print("{\n" + ",\n".join(rows) + "\n}")


if __name__ == "__main__":
    main()
