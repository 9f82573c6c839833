"""What the GPU engine's outputs lose: against float32 with an exact cache, per level, beside the CPU engine in bf16.

    python benchmarks/gpu_quality.py [--model smollm2] [--windows 2] [--tokens 1024] [--out results.json]

Teacher forcing over the shipped corpus, a page per step, every sealed page at once as low as the pool allows (the
first page of a sequence keeps 8 bits). Mean KL in nats per token after the first 64 of a window, and the ratio of
the means on both devices with the range that holds 95 % of its values over resampled pages.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvpilot.agent.bench.quality import corpus_windows, kl_divergence
from kvpilot.engine.attention import PagedAttention, rope_tables
from kvpilot.engine.kv.cuda_storage import CudaStorage
from kvpilot.engine.kv.formats import PageShape, payload_bytes
from kvpilot.engine.kv.pool import KVPool, Page
from kvpilot.engine.kv.torch_storage import TorchStorage
from kvpilot.engine.model.device import make_llama
from kvpilot.engine.model.fetch import resolve_model
from kvpilot.engine.model.llama import Llama
from kvpilot.engine.model.load import read_checkpoint
from kvpilot.engine.request import Request, ScheduledRequest
from kvpilot.engine.runners.cuda_runner import CudaRunner
from kvpilot.engine.runners.step_plan import mixed_plan

Forward = Callable[[list[ScheduledRequest]], Tensor]
LADDERS = {
    "bf16": ("bf16",),
    "int8": ("bf16", "int8"),
    "fp8": ("bf16", "fp8"),
    "int4": ("bf16", "int8", "int4"),
}
SKIPPED_TOKENS = 64
RESAMPLES = 5000


class Windows:
    """Texts side by side in a pool of their own."""

    def __init__(self, pool: KVPool, texts: Tensor, forward: Forward) -> None:
        self._pool = pool
        self._forward = forward
        self._requests = [
            Request(
                request_id=str(i),
                num_prompt_tokens=len(text),
                max_tokens=1,
                arrival_time=0.0,
                block_hash=lambda block: block,
                tokens=text.tolist(),
            )
            for i, text in enumerate(texts)
        ]

    @torch.inference_mode()
    def next_page(self, page_size: int) -> Tensor:
        """Log-probabilities float32 [windows * page_size, vocabulary]."""
        start = len(self._requests[0].pages) * page_size
        for request in self._requests:
            request.pages.append(self._pool.allocate())
        batch = [ScheduledRequest(request, start, page_size, False) for request in self._requests]
        logp = self._forward(batch).log_softmax(-1)
        for request in self._requests:
            self._step_down(request.pages[-1], is_sink=start == 0)
        return logp

    def _step_down(self, page: Page, *, is_sink: bool) -> None:
        self._pool.seal(page, is_sink=is_sink)
        while page.level < self._pool.floor_level(page):
            assert self._pool.has_cells(page.level + 1)
            assert self._pool.step_down(page)


def on_cpu(model: Llama, shape: PageShape, ladder: tuple[str, ...], texts: Tensor) -> Windows:
    pool_bytes = pool_size(shape, ladder, texts)
    storage = TorchStorage(shape, ladder, pool_bytes)
    rope = rope_tables(model.config.rope_inverse_frequencies, texts.shape[1])
    attention = PagedAttention(shape, model.config.num_heads, storage, rope)

    def forward(batch: list[ScheduledRequest]) -> Tensor:
        tokens = [token for r, start, new, _ in batch for token in (r.tokens or [])[start : start + new]]
        plan = attention.plan(batch)
        return model.logits(
            model.forward(torch.tensor(tokens), lambda layer, qkv: attention(layer, qkv, plan))
        )

    return Windows(KVPool(shape=shape, ladder=ladder, pool_bytes=pool_bytes, storage=storage), texts, forward)


def on_gpu(
    model: Llama, shape: PageShape, ladder: tuple[str, ...], texts: Tensor, device: torch.device
) -> Windows:
    pool_bytes = pool_size(shape, ladder, texts)
    storage = CudaStorage(shape, ladder, pool_bytes, model.config.num_heads, device)
    runner = CudaRunner(model, storage, max_sequences=len(texts), max_tokens=texts.shape[1])

    def forward(batch: list[ScheduledRequest]) -> Tensor:
        return model.logits(runner._forward(*mixed_plan([], batch, runner._inputs)))

    return Windows(KVPool(shape=shape, ladder=ladder, pool_bytes=pool_bytes, storage=storage), texts, forward)


def pool_size(shape: PageShape, ladder: tuple[str, ...], texts: Tensor) -> int:
    slots = len(texts) * -(-texts.shape[1] // shape.page_size) + 2 * len(ladder)
    return slots * payload_bytes(ladder[0], shape)


def ratio_range(upper: Tensor, lower: Tensor) -> tuple[float, float]:
    """Of mean(upper) / mean(lower), both drawn from the same rows with replacement: 2.5 and 97.5 %."""
    rows = np.random.default_rng(0).integers(0, len(upper), (RESAMPLES, len(upper)))
    ratios = upper.numpy()[rows].mean(1) / lower.numpy()[rows].mean(1)
    low, high = np.quantile(ratios, [0.025, 0.975]).tolist()
    return low, high


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    checkpoint = read_checkpoint(resolve_model(arguments.model))
    config, device, cpu = checkpoint.config, torch.device(arguments.device), torch.device("cpu")
    shape = PageShape(
        num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim
    )
    texts = corpus_windows(checkpoint.load_tokenizer().encode, arguments.windows, arguments.tokens)[
        :, : arguments.tokens
    ]
    exact = on_cpu(make_llama(config, checkpoint.get, torch.float32, cpu), shape, ("fp32",), texts)
    model_cpu = make_llama(config, checkpoint.get, torch.bfloat16, cpu)
    model_gpu = make_llama(config, lambda name: checkpoint.get(name).to(device), torch.bfloat16, device)
    runs = {("cpu", name): on_cpu(model_cpu, shape, ladder, texts) for name, ladder in LADDERS.items()}
    runs |= {
        ("gpu", name): on_gpu(model_gpu, shape, ladder, texts, device) for name, ladder in LADDERS.items()
    }
    losses: dict[tuple[str, str], list[Tensor]] = {key: [] for key in runs}
    for begin in range(0, arguments.tokens, shape.page_size):
        expected = exact.next_page(shape.page_size).to(device)
        for key, windows in runs.items():
            actual = windows.next_page(shape.page_size).to(device)
            if begin >= SKIPPED_TOKENS:
                losses[key].append(kl_divergence(expected, actual).view(-1, shape.page_size).mean(1).cpu())
    pages = {key: torch.cat(parts) for key, parts in losses.items()}
    means = {key: values.mean().item() for key, values in pages.items()}
    result = {
        "model": arguments.model,
        "scored": len(pages["gpu", "bf16"]) * shape.page_size,
        "kl": {name: {where: means[where, name] for where in ("cpu", "gpu")} for name in LADDERS},
        "gpu_over_cpu": {name: means["gpu", name] / means["cpu", name] for name in LADDERS},
        "range_95": {name: ratio_range(pages["gpu", name], pages["cpu", name]) for name in LADDERS},
    }
    print(json.dumps(result, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
