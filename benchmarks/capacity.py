"""Tokens that a fixed pool holds at each precision, by filling a real one; every byte of it is counted.

    python -P benchmarks/capacity.py --pool-mb 64

The pool's memory is the whole budget: scales live in it too, and the slots that the bookkeeping keeps free for
conversions count against it. Sequences are `--sequence-tokens` long, so one page in `sequence / page size` is a sink
and keeps 8 bits. A pool is full when no further page can be had at the lowest level allowed.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kvpilot.engine.kv.formats import PageShape
from kvpilot.engine.kv.page import Page
from kvpilot.engine.kv.pool import KVPool
from kvpilot.engine.kv.torch_storage import TorchStorage

SMOLLM2 = PageShape(num_layers=30, num_kv_heads=3, head_dim=64)
LLAMA3_8B = PageShape(num_layers=32, num_kv_heads=8, head_dim=128)
SHAPES = {"smollm2": SMOLLM2, "llama3-8b": LLAMA3_8B}
LADDER = ("bf16", "int8", "int4")


@dataclass(frozen=True, kw_only=True)
class Capacity:
    kv_level: int
    codec: str
    tokens: int
    pool_bytes: int
    ratio: float  # to the bf16-only pool


def fill(shape: PageShape, pool_bytes: int, ladder: tuple[str, ...], sequence_tokens: int) -> int:
    """Pages that fit when every sealed page goes as low as the ladder and the sink rule allow."""
    storage = TorchStorage(shape, ladder, pool_bytes)
    pool = KVPool(shape=shape, ladder=ladder, pool_bytes=pool_bytes, storage=storage)
    assert storage.pool.nbytes == pool_bytes
    size = (shape.num_layers, shape.num_kv_heads, shape.page_size, shape.head_dim)
    k_LHPD, v_LHPD = torch.randn(size), torch.randn(size)
    pages_per_sequence = sequence_tokens // shape.page_size
    high: list[Page] = []  # may still be stepped down
    num_pages = 0
    while True:
        while pool.available_slots < 1 and high:
            page = high[0]
            if page.level == pool.floor_level(page) or not pool.has_cells(page.level + 1):
                high.pop(0)
                continue
            assert pool.step_down(page)
        if pool.available_slots < 1 and not pool.compact():
            break
        if pool.available_slots < 1:
            continue
        page = pool.allocate()
        storage.write_page(0, page.payload, page.scales, k_LHPD, v_LHPD)
        pool.seal(page, is_sink=num_pages % pages_per_sequence == 0)
        high.append(page)
        num_pages += 1
    pool.check_integrity()
    return num_pages


def measure(shape: PageShape, pool_bytes: int, sequence_tokens: int) -> list[Capacity]:
    """One row per level of the ladder; the first has bf16 alone."""
    tokens = [
        fill(shape, pool_bytes, LADDER[: level + 1], sequence_tokens) * shape.page_size
        for level in range(len(LADDER))
    ]
    return [
        Capacity(
            kv_level=level,
            codec=codec,
            tokens=count,
            pool_bytes=pool_bytes,
            ratio=round(count / tokens[0], 3),
        )
        for level, (codec, count) in enumerate(zip(LADDER, tokens, strict=True))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="smollm2", help="layers and heads of the model")
    parser.add_argument("--pool-mb", type=int, default=256, help="the budget in MiB")
    parser.add_argument("--sequence-tokens", type=int, default=2048, help="length of each sequence")
    parser.add_argument("--json", type=Path, help="write the result here too")
    args = parser.parse_args()
    rows = measure(SHAPES[args.shape], args.pool_mb << 20, args.sequence_tokens)
    print(f"{args.shape}, {args.pool_mb} MiB, sequences of {args.sequence_tokens} tokens")
    for row in rows:
        print(f"{row.codec:>5}  {row.tokens:>8} tokens  {row.ratio:.2f}x")
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
