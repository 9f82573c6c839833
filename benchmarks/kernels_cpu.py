"""Attention kernels of the CPU, per precision, against torch's SDPA and against reading memory.

    python benchmarks/kernels_cpu.py [THREADS]

With one thread, times are CPU times, which other processes on the machine disturb little.
Decode: one layer of SmolLM2-135M's shape (9 query heads, 3 kv heads, head_dim 64), pages of 32 in random order,
bf16 computation; torch's SDPA reads a dense padded cache of the same tokens in bf16. Layers are visited in turn, as
a model does, so that a large cache comes from memory. Best of several rounds; "read" is the time that one pass of
`torch.sum` over as many bytes takes.
"""

import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from kvpilot.engine import kernels
from kvpilot.engine.kernels import PageTable
from kvpilot.engine.kv.formats import PageShape, payload_bytes, scale_bytes
from kvpilot.engine.kv.storage import Cell, Conversion
from kvpilot.engine.kv.torch_storage import TorchStorage

NUM_HEADS, ROUNDS = 9, 7
SHAPE = PageShape(num_layers=8, num_kv_heads=3, head_dim=64, page_size=32)
LADDERS = (("fp32",), ("bf16",), ("bf16", "int8"), ("bf16", "fp8"), ("bf16", "int4"))


def best_microseconds(run: Callable[[int], object]) -> float:
    """Of one layer, over several rounds through all layers."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = float("inf")
    for _ in range(ROUNDS):
        begin = clock()
        for layer in range(SHAPE.num_layers):
            run(layer)
        best = min(best, (clock() - begin) / SHAPE.num_layers)
    return best * 1e6


def filled(ladder: tuple[str, ...], num_sequences: int, num_tokens: int) -> tuple[TorchStorage, PageTable]:
    """Sequences whose pages are all at the last level of the ladder."""
    level, num_pages = len(ladder) - 1, -(-num_tokens // SHAPE.page_size)
    full_bytes = payload_bytes(ladder[0], SHAPE)
    page_bytes, page_scale_bytes = payload_bytes(ladder[-1], SHAPE), scale_bytes(ladder[-1], SHAPE)
    count = num_sequences * num_pages
    storage = TorchStorage(SHAPE, ladder, full_bytes + count * (page_bytes + page_scale_bytes))
    size = (SHAPE.num_layers, SHAPE.num_kv_heads, SHAPE.page_size, SHAPE.head_dim)
    storage.write_page(0, 0, -1, torch.randn(size), torch.randn(size))
    cells = np.empty((count, 3), dtype=np.int64)
    for i, place in enumerate(np.random.default_rng(0).permutation(count).tolist()):
        at = Cell(full_bytes + place * page_bytes, full_bytes + count * page_bytes + place * page_scale_bytes)
        storage.convert([Conversion(Cell(0, -1), 0, at, level)])
        cells[i] = (level, *at)
    indptr = np.arange(num_sequences + 1) * num_pages
    return storage, PageTable(cells=cells, indptr=indptr, num_tokens=np.full(num_sequences, num_tokens))


def sdpa_microseconds(num_sequences: int, num_new: int, num_tokens: int) -> float:
    """torch's SDPA over a dense bf16 cache; a whole prompt is causal."""
    size = (SHAPE.num_layers, num_sequences, SHAPE.num_kv_heads, num_tokens, SHAPE.head_dim)
    k, v = (torch.randn(size, dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(num_sequences, NUM_HEADS, num_new, SHAPE.head_dim, dtype=torch.bfloat16)
    attention = torch.nn.functional.scaled_dot_product_attention
    causal = num_new == num_tokens
    return best_microseconds(
        lambda layer: attention(q, k[layer], v[layer], is_causal=causal, enable_gqa=True)
    )


def read_microseconds(num_bytes: int) -> float:
    layers = torch.zeros(SHAPE.num_layers, num_bytes // 8, dtype=torch.int64)
    return best_microseconds(lambda layer: layers[layer].sum())


def decode(num_sequences: int, num_tokens: int) -> None:
    q = torch.randn(num_sequences, NUM_HEADS, SHAPE.head_dim, dtype=torch.bfloat16)
    sdpa = sdpa_microseconds(num_sequences, 1, num_tokens)
    print(f"\ndecode, batch {num_sequences}, context {num_tokens}: torch SDPA bf16 {sdpa:.0f} us per layer")
    for ladder in LADDERS:
        storage, table = filled(ladder, num_sequences, num_tokens)

        def run(layer: int, storage: TorchStorage = storage, table: PageTable = table) -> object:
            return kernels.decode_attention(q, storage, layer, table)

        ours = best_microseconds(run)
        page_bytes = payload_bytes(ladder[-1], SHAPE) + scale_bytes(ladder[-1], SHAPE)
        read = read_microseconds(len(table.cells) * page_bytes // SHAPE.num_layers)
        print(
            f"  {ladder[-1]:5} {ours:7.0f} us   {sdpa / ours:5.1f} x SDPA   {ours / read:5.1f} x reading the bytes"
        )


def prefill(start: int, num_new: int) -> None:
    q = torch.randn(num_new, NUM_HEADS, SHAPE.head_dim, dtype=torch.bfloat16)
    sdpa = sdpa_microseconds(1, num_new, start + num_new)
    print(f"\nprefill of {num_new} after {start}: torch SDPA bf16 {sdpa:.0f} us per layer")
    for ladder in (("bf16",), ("bf16", "int8"), ("bf16", "int4")):
        storage, table = filled(ladder, 1, start + num_new)

        def run(layer: int, storage: TorchStorage = storage, table: PageTable = table) -> object:
            return kernels.prefill_attention(q, storage, layer, table.cells, start)

        ours = best_microseconds(run)
        print(f"  {ladder[-1]:5} {ours:7.0f} us   {sdpa / ours:5.1f} x SDPA")


def main() -> None:
    if len(sys.argv) > 1:
        torch.set_num_threads(int(sys.argv[1]))
    print(f"kernels: {kernels.IMPLEMENTATION}, {torch.get_num_threads()} threads")
    for num_sequences, num_tokens in ((1, 2048), (16, 200), (16, 2048)):
        decode(num_sequences, num_tokens)
    for start, num_new in ((0, 256), (1792, 256)):
        prefill(start, num_new)


if __name__ == "__main__":
    main()
