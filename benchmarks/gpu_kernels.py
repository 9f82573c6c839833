"""Decode attention, conversions and moves of pages on a GPU: time, bandwidth and error, against FlashInfer.

    python benchmarks/gpu_kernels.py [--out results.json] [--quick]

Times are medians of CUDA graph replays. FlashInfer (bf16, tensor cores) runs in the same process if it can be
imported, else torch's SDPA over dense K and V. Errors are against float64 on the stored codes.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvpilot.engine.kernels import PageTable
from kvpilot.engine.kernels.gpu.convert import convert_pages
from kvpilot.engine.kernels.gpu.decode import DecodeTable, decode_attention, decode_table
from kvpilot.engine.kernels.gpu.layout import from_gpu
from kvpilot.engine.kv.codecs import make_codec
from kvpilot.engine.kv.formats import PageShape, payload_bytes, scale_bytes

DEVICE = torch.device("cuda")
LAYER = 5  # of the pages' 32, so that blocks lie as far apart as in a model
CODECS = ("bf16", "int8", "fp8", "int4")
WARM_UP_SECONDS = 0.1  # replays after a pause run up to 15 % slower at first


@dataclass(frozen=True, kw_only=True)
class Case:
    batch: int
    context: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 32
    num_layers: int = 32

    @property
    def shape(self) -> PageShape:
        return PageShape(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
        )

    def layer_bytes(self, codec: str) -> int:
        """That one layer of one page takes."""
        return (payload_bytes(codec, self.shape) + scale_bytes(codec, self.shape)) // self.num_layers


CASES = (
    Case(batch=64, context=8192),
    Case(batch=32, context=8192),
    Case(batch=256, context=1024),
    Case(batch=1, context=32768),
)
OTHER_SHAPES = (
    Case(batch=64, context=8192, page_size=64, num_layers=16),
    Case(batch=64, context=8192, num_heads=8),
    Case(batch=64, context=8192, num_heads=64),
    Case(batch=64, context=8192, head_dim=64),
    Case(batch=128, context=8192, head_dim=64, num_heads=9, num_kv_heads=3),
)


def graph_milliseconds(calls: Sequence[Callable[[], object]], repeats: int = 30) -> float:
    """Median time of one call, all of them captured in one graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    end = time.perf_counter() + WARM_UP_SECONDS
    while time.perf_counter() < end:
        graph.replay()
        torch.cuda.synchronize()
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) / len(calls)


class Pages:
    """A pool holding `count` pages of each codec, with random codes in one layer of each."""

    def __init__(self, case: Case, counts: dict[str, int]) -> None:
        self.case = case
        self.cells: dict[str, np.ndarray] = {}
        total = sum(
            n * (payload_bytes(c, case.shape) + scale_bytes(c, case.shape)) for c, n in counts.items()
        )
        self.pool = torch.empty(total, dtype=torch.uint8, device=DEVICE)
        offset = 0
        for codec, count in counts.items():
            places = []
            for size in (payload_bytes(codec, case.shape), scale_bytes(codec, case.shape)):
                order = np.random.default_rng(0).permutation(count)
                places.append(offset + order * size)
                offset += count * size
            self.cells[codec] = np.stack(places, axis=1)
            self._fill(codec, count)

    def _layer(self, codec: str, count: int, column: int, size: int) -> Tensor:
        """The layer's bytes of all pages of a codec, [count, bytes]."""
        per_layer = size // self.case.num_layers
        start = int(self.cells[codec][:, column].min()) + LAYER * per_layer
        return torch.as_strided(self.pool, (count, per_layer), (size, 1), start)

    def _fill(self, codec: str, count: int) -> None:
        shape = self.case.shape
        payload = self._layer(codec, count, 0, payload_bytes(codec, shape))
        for begin in range(0, count, 2048):
            rows = payload[begin : begin + 2048]
            rows.copy_(random_payload(codec, rows.numel()).view_as(rows))
        if codec != "bf16":
            scales = self._layer(codec, count, 1, scale_bytes(codec, shape))
            for begin in range(0, count, 2048):
                rows = scales[begin : begin + 2048]
                rows.copy_(random_scales(codec, shape, len(rows)).view_as(rows))

    def read(self, codec: str, cell: np.ndarray) -> tuple[Tensor, Tensor]:
        """K and V of the layer of one page, float64 [H, P, D]."""
        one = PageShape(
            num_layers=1,
            num_kv_heads=self.case.num_kv_heads,
            head_dim=self.case.head_dim,
            page_size=self.case.page_size,
        )
        parts = []
        for start, size in zip(
            cell.tolist(), (payload_bytes(codec, one), scale_bytes(codec, one)), strict=True
        ):
            parts.append(self.pool[start + LAYER * size :][:size].cpu())
        k, v = make_codec(codec, one).decode(*from_gpu(codec, one, *parts))
        return k[0].double(), v[0].double()


def random_payload(codec: str, num_bytes: int) -> Tensor:
    if codec == "bf16":
        return torch.randn(num_bytes // 2, device=DEVICE, dtype=torch.bfloat16).view(torch.uint8)
    if codec == "fp8":
        values = torch.randn(num_bytes, device=DEVICE) * 100
        return values.clamp_(-440, 440).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.randint(int(codec == "int8"), 256, (num_bytes,), device=DEVICE, dtype=torch.uint8)


def random_scales(codec: str, shape: PageShape, count: int) -> Tensor:
    """Bytes of `count` pages' scales in one layer, so that K and V come out near unit variance."""
    heads, tokens, dim = shape.num_kv_heads, shape.page_size, shape.head_dim

    def uniform(low: float, high: float, *size: int) -> Tensor:
        return (torch.rand(count, heads, *size, device=DEVICE) * (high - low) + low).half()

    if codec != "int4":
        return uniform(0.005, 0.02, tokens, 2).view(torch.uint8)
    channels = torch.randint(100, 256, (count, heads, dim // 2, 4), device=DEVICE, dtype=torch.uint8)
    channels[..., 2:] = 255 - channels[..., 2:]  # mins are negative
    units = torch.cat((uniform(0.0012, 0.0016, 1), uniform(0.018, 0.024, 1)), dim=-1)
    values = torch.stack((uniform(0.2, 0.3, tokens), uniform(-2.0, -1.5, tokens)), dim=-1)
    parts = (channels.flatten(2), units.view(torch.uint8), values.flatten(2).view(torch.uint8))
    return torch.cat(parts, dim=-1)


def tables(
    pages: Pages, ladder: tuple[str, ...], per_sequence: list[int], num_sets: int
) -> list[tuple[PageTable, DecodeTable]]:
    """Tables over disjoint pages; each sequence has `per_sequence[level]` pages of each level."""
    case, made = pages.case, []
    num_pages = sum(per_sequence)
    for i in range(num_sets):
        rows = []
        for b in range(case.batch):
            for level, count in enumerate(per_sequence):
                if count == 0:
                    continue
                begin = (i * case.batch + b) * count
                cells = pages.cells[ladder[level]][begin : begin + count]
                rows.append(np.column_stack((np.full(count, level), cells)))
        table = PageTable(
            cells=np.concatenate(rows),
            indptr=np.arange(case.batch + 1) * num_pages,
            num_tokens=np.full(case.batch, num_pages * case.page_size),
        )
        made.append((table, decode_table(table, ladder, case.shape, DEVICE)))
    return made


def attention_error(pages: Pages, ladder: tuple[str, ...], table: PageTable, q: Tensor, out: Tensor) -> float:
    """Relative error of the first and the last sequence against float64 on the stored codes."""
    case, expected = pages.case, []
    for b in (0, case.batch - 1):
        cells = table.cells[table.indptr[b] : table.indptr[b + 1]]
        read = [pages.read(ladder[level], np.array(cell)) for level, *cell in cells.tolist()]
        k, v = (torch.cat(part, dim=1) for part in zip(*read, strict=True))
        q_HGD = q[b].cpu().double().view(case.num_kv_heads, -1, case.head_dim)
        expected.append((q_HGD @ k.mT / math.sqrt(case.head_dim)).softmax(-1) @ v)
    reference = torch.stack(expected).flatten(1, 2)
    actual = out[[0, -1]].cpu().double()
    return ((actual - reference).norm() / reference.norm()).item()


def measure_own(case: Case, ladder: tuple[str, ...], per_sequence: list[int], num_sets: int) -> dict:
    counts = {
        codec: n * case.batch * num_sets for codec, n in zip(ladder, per_sequence, strict=True) if n > 0
    }
    pages = Pages(case, counts)
    made = tables(pages, ladder, per_sequence, num_sets)
    q = torch.randn(case.batch, case.num_heads, case.head_dim, device=DEVICE).bfloat16()
    out = decode_attention(q, pages.pool, case.shape, LAYER, made[0][1])
    error = attention_error(pages, ladder, made[0][0], q, out)
    calls = [partial(decode_attention, q, pages.pool, case.shape, LAYER, t) for _, t in made]
    milliseconds = graph_milliseconds(calls)
    num_bytes = case.batch * sum(n * case.layer_bytes(c) for c, n in zip(ladder, per_sequence, strict=True))
    return {
        "ms": milliseconds,
        "gb_per_s": num_bytes / milliseconds / 1e6,
        "error": error,
        "items": len(made[0][1].items_I),
    }


def measure_peer(case: Case, num_sets: int) -> dict:
    """bf16 through FlashInfer over the same pool, or through torch's SDPA."""
    num_pages = case.context // case.page_size
    pages = Pages(case, {"bf16": case.batch * num_pages * num_sets})
    q = torch.randn(case.batch, case.num_heads, case.head_dim, device=DEVICE).bfloat16()
    try:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        print(f"flashinfer cannot be imported ({error}): torch SDPA instead")
        return {"name": "torch SDPA", "ms": _sdpa_milliseconds(case, q)}
    slot_values = payload_bytes("bf16", case.shape) // 2
    block = case.page_size * case.head_dim
    kv = torch.as_strided(
        pages.pool.view(torch.bfloat16),
        (case.batch * num_pages * num_sets, 2, case.num_kv_heads, case.page_size, case.head_dim),
        (slot_values, case.num_kv_heads * block, block, case.head_dim, 1),
        LAYER * slot_values // case.num_layers,
    )
    indices = torch.from_numpy(pages.cells["bf16"][:, 0] // (2 * slot_values)).to(DEVICE, torch.int32)
    calls, out = [], torch.empty_like(q)
    for part in indices.chunk(num_sets):
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
        wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(
            torch.arange(case.batch + 1, dtype=torch.int32, device=DEVICE) * num_pages,
            part.contiguous(),
            torch.full((case.batch,), case.page_size, dtype=torch.int32, device=DEVICE),
            case.num_heads,
            case.num_kv_heads,
            case.head_dim,
            case.page_size,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        calls.append(partial(wrapper.run, q, kv, out=out))
    return {"name": "FlashInfer", "ms": graph_milliseconds(calls)}


def _sdpa_milliseconds(case: Case, q_BHD: Tensor) -> float:
    size = (case.batch, case.num_kv_heads, case.context, case.head_dim)
    k, v = (torch.randn(size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    attend = torch.nn.functional.scaled_dot_product_attention
    return graph_milliseconds([lambda: attend(q_BHD[:, :, None], k, v, enable_gqa=True)])


def copy_gb_per_s() -> float:
    source = torch.randint(1 << 62, ((4 << 30) // 8,), device=DEVICE)
    target = torch.empty_like(source)
    # A kernel: `copy_` in a graph becomes a memory copy node, which reaches two thirds of this
    milliseconds = graph_milliseconds([lambda: torch.bitwise_not(source, out=target)])
    return 2 * source.nbytes / milliseconds / 1e6


def measure_conversion(source: str, target: str, num_pages: int) -> dict:
    """Whole pages of 32 layers, out of place; `gb_per_s` counts bytes read and written."""
    case = CASES[0]
    shape = case.shape
    sizes = [size(codec, shape) for codec in (source, target) for size in (payload_bytes, scale_bytes)]
    pool = torch.randn(sum(sizes) * num_pages // 2, device=DEVICE, dtype=torch.bfloat16).view(torch.uint8)
    starts = np.cumsum([0, *(size * num_pages for size in sizes[:-1])])
    order = np.random.default_rng(0).permutation(num_pages)
    jobs = np.stack([start + order * size for start, size in zip(starts, sizes, strict=True)], axis=1)
    if source == "bf16":
        jobs[:, 1] = -1
    else:  # codes are random bytes already
        scales = pool[starts[1] : starts[2]]
        scales.copy_(random_scales(source, shape, num_pages * case.num_layers).view_as(scales))
    jobs_N4 = torch.from_numpy(jobs).to(DEVICE)
    milliseconds = graph_milliseconds([lambda: convert_pages(pool, shape, source, target, jobs_N4)])
    return {"ms": milliseconds, "gb_per_s": sum(sizes) * num_pages / milliseconds / 1e6}


def run(quick: bool) -> dict:
    results: dict = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "decode": []}
    results["copy_gb_per_s"] = copy_gb_per_s()
    print(f"{results['device']}, copy {results['copy_gb_per_s']:.0f} GB/s")
    for case in CASES[:1] if quick else (*CASES, *OTHER_SHAPES):
        num_sets = 16 if case.batch == 1 else 1
        num_pages = case.context // case.page_size
        row: dict = {"case": vars(case), "peer": measure_peer(case, num_sets)}
        for codec in CODECS:
            ladder = ("bf16",) if codec == "bf16" else ("bf16", codec)
            row[codec] = measure_own(case, ladder, [0] * (len(ladder) - 1) + [num_pages], num_sets)
        if case.batch > 1:
            shares = [num_pages // 4, num_pages // 4, num_pages // 2]
            row["mixed"] = measure_own(case, ("bf16", "int8", "int4"), shares, num_sets)
            pure = row["bf16"]["ms"] / 4 + row["int8"]["ms"] / 4 + row["int4"]["ms"] / 2
            row["mixed"]["over_pure"] = row["mixed"]["ms"] / pure
        results["decode"].append(row)
        print_row(case, row)
    results["conversions"] = []
    for source, target in (("bf16", "int8"), ("bf16", "fp8"), ("int8", "int4"), ("bf16", "int4")):
        for num_pages in (512, 64):
            result = measure_conversion(source, target, num_pages)
            result |= {"source": source, "target": target, "pages": num_pages}
            result["share_of_copy"] = result["gb_per_s"] / results["copy_gb_per_s"]
            results["conversions"].append(result)
            print(
                f"{source} -> {target}, {num_pages} pages: {result['ms']:.3f} ms, {result['share_of_copy']:.2f} of copy"
            )
    return results


def print_row(case: Case, row: dict) -> None:
    peer = row["peer"]
    print(
        f"B={case.batch} context {case.context}, {case.num_heads}/{case.num_kv_heads} heads of {case.head_dim}, "
        f"page {case.page_size}: {peer['name']} {peer['ms']:.4f} ms"
    )
    for name in (*CODECS, "mixed"):
        if name in row:
            own = row[name]
            extra = f", {own['over_pure']:.2f} x the pure levels" if "over_pure" in own else ""
            print(
                f"  {name:5} {own['ms']:.4f} ms  {own['gb_per_s']:5.0f} GB/s  {peer['ms'] / own['ms']:.2f} x  "
                f"error {own['error']:.5f}  items {own['items']}{extra}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--quick", action="store_true", help="the first shape only")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    results = run(arguments.quick)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
