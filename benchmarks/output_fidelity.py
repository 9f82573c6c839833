"""KL over the whole vocabulary of this engine, and of bf16 transformers, to transformers in float32.

    python -P benchmarks/output_fidelity.py MODEL.gguf

Needs the extra `bench`. Same 12 prompts and 32-token continuations as tests/correctness/golden.npz, one request at a
time through prefill and decode of the whole engine. The test checks a lower bound of this KL without transformers.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import transformers  # pyright: ignore[reportMissingImports]
from torch import Tensor

from kvpilot.engine.config import EngineConfig
from kvpilot.engine.factory import build_engine
from kvpilot.engine.model.llama import Llama
from kvpilot.engine.model.load import load_model
from kvpilot.engine.request import SamplingParams

GOLDEN = Path(__file__).parent.parent / "tests" / "correctness" / "golden.npz"


class RecordingLlama(Llama):
    """Keeps the logits of every step."""

    steps: list[Tensor]

    def logits(self, hidden_NH: Tensor) -> Tensor:
        self.steps.append(super().logits(hidden_NH).clone())
        return self.steps[-1]


def transformers_logprobs(
    path: Path, dtype: torch.dtype, texts: list[tuple[list[int], list[int]]]
) -> list[Tensor]:
    """Log-probabilities [N, V] behind each continuation, teacher-forced in one pass."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent),
        gguf_file=path.name,
        dtype=dtype,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    rows = []
    with torch.inference_mode():
        for prompt, tokens in texts:
            logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
            rows.append(logits.double().log_softmax(-1))
    return rows


def engine_logprobs(path: Path, dtype: torch.dtype, texts: list[tuple[list[int], list[int]]]) -> list[Tensor]:
    """The same through `Engine.step`: each token of a continuation is computed by one decode step.

    Decoding is greedy, so a row counts only as long as the output is the continuation; where it parts, the request
    starts again with the continuation up to there as its prompt (a prefix-cache hit, and the next row).
    """
    llama = load_model(str(path), dtype).llama
    llama.__class__ = RecordingLlama
    assert isinstance(llama, RecordingLlama)
    ladder = ("fp32",) if dtype == torch.float32 else ("bf16",)
    engine = build_engine(llama, EngineConfig(ladder=ladder))
    rows = []
    for index, (prompt, tokens) in enumerate(texts):
        found: list[Tensor] = []
        while len(found) < len(tokens):
            llama.steps = []
            done = len(found)
            request = engine.add_request(
                f"{index}-{done}",
                prompt + tokens[:done],
                SamplingParams(max_tokens=len(tokens) - done, ignore_eos=True),
            )
            while engine.has_work():
                engine.step()
            output = (request.tokens or [])[len(prompt) + done :]
            agreed = next(
                (i for i, (a, b) in enumerate(zip(output, tokens[done:], strict=True)) if a != b), None
            )
            found += llama.steps[: len(output) if agreed is None else agreed + 1]
        rows.append(torch.cat(found).double().log_softmax(-1))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="the GGUF file")
    parser.add_argument("--json", type=Path, help="write the result here too")
    args = parser.parse_args()
    golden = np.load(GOLDEN)
    names = [key.removesuffix(".prompt") for key in golden.files if key.endswith(".prompt")]
    texts = [(golden[f"{name}.prompt"].tolist(), golden[f"{name}.tokens"].tolist()) for name in names]
    exact = transformers_logprobs(args.model, torch.float32, texts)
    result = {}
    for label, rows in (
        ("kvpilot float32", engine_logprobs(args.model, torch.float32, texts)),
        ("kvpilot bfloat16", engine_logprobs(args.model, torch.bfloat16, texts)),
        ("transformers bfloat16", transformers_logprobs(args.model, torch.bfloat16, texts)),
    ):
        kl = torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in zip(exact, rows, strict=True)])
        result[label] = {"kl_mean": kl.mean().item(), "kl_max": kl.max().item(), "tokens": len(kl)}
        print(f"{label:22} mean {kl.mean():.2e}  largest {kl.max():.2e}  over {len(kl)} tokens")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
