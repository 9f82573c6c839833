"""Decode steps and output rate of the whole engine on a GPU, Llama-3.1-8B shapes with random weights.

    python benchmarks/gpu_decode.py [--out results.json] [--quick] [--profile DIR]

Milliseconds per step are (time for 128 new tokens - time for 16 new tokens) / 112, all requests submitted at once;
the floor is (weights + K and V read) / copy bandwidth. Levels below bf16: pages of the context are stepped down
before the step is measured, as far as the engine's floors allow; with several levels, page after page in turn.
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch

from kvpilot.engine.config import EngineConfig, Knobs
from kvpilot.engine.engine import Engine
from kvpilot.engine.factory import build_engine
from kvpilot.engine.model.config import ModelConfig
from kvpilot.engine.model.device import make_llama
from kvpilot.engine.model.dummy import random_weights
from kvpilot.engine.model.llama import Llama
from kvpilot.engine.request import SamplingParams

LLAMA_3_1_8B = ModelConfig(
    architecture="llama",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
    max_position=131072,
    rope_theta=500_000.0,
)
SLOT_BYTES = 32 * 2 * 8 * 32 * 128 * 2
WEIGHT_BYTES = 15.0e9


@dataclass(frozen=True, kw_only=True)
class Case:
    batch: int
    prompt: int
    levels: tuple[int, ...] = (0,)
    page_size: int = 32

    @property
    def slot_bytes(self) -> int:
        return SLOT_BYTES // 32 * self.page_size


CASES = (
    Case(batch=1, prompt=512),
    Case(batch=64, prompt=512),
    Case(batch=256, prompt=512),
    *(Case(batch=32, prompt=8192, levels=levels) for levels in ((0,), (1,), (2,), (0, 1, 2, 2))),
    Case(batch=32, prompt=8192, levels=(2,), page_size=64),
)


def make_engine(model: Llama, case: Case, prefill_chunk: int) -> Engine:
    pages = case.batch * -(-(case.prompt + 160) // case.page_size)
    config = EngineConfig(
        pool_bytes=(2 * pages + 64) * case.slot_bytes,
        page_size=case.page_size,
        prefill_chunk=prefill_chunk,
        max_batch_ceiling=case.batch,
        max_model_len=case.prompt + 256,
        knobs=Knobs(max_batch=case.batch),
    )
    return build_engine(model, config)


def submit(engine: Engine, case: Case, max_tokens: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for i in range(case.batch):
        prompt = torch.randint(1, 100_000, (case.prompt,), generator=generator).tolist()
        engine.add_request(f"{seed}-{i}", prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def finish_seconds(engine: Engine, case: Case, max_tokens: int, seed: int) -> float:
    submit(engine, case, max_tokens, seed)
    torch.cuda.synchronize()
    start = time.perf_counter()
    while engine.has_work():
        engine.step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def step_down_all(engine: Engine, levels: tuple[int, ...]) -> None:
    """Every sealed page of the running requests to the lowest rung that its floor and its turn of `levels` allow."""
    for request in engine.scheduler.running:
        for page, level in zip(request.pages[: request.num_sealed], cycle(levels), strict=False):
            while page.level < min(level, engine.pool.floor_level(page)):
                engine.cache._live_sealed[page.level].pop(page)
                engine.pool.step_down(page)
                if page.level < page.max_level:
                    engine.cache._live_sealed[page.level][page] = None
    engine.check_integrity()


def decode_step_seconds(engine: Engine, case: Case, seed: int) -> tuple[list[float], tuple[int, ...]]:
    """Durations of decode steps after the pages were stepped down, and pages read per step by level."""
    submit(engine, case, 100, seed)
    while not all(request.is_decoding for request in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    step_down_all(engine, case.levels)
    seconds = []
    for _ in range(60):
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
    reads = tuple(engine.pool.page_reads)
    while engine.has_work():
        engine.step()
    return seconds[4:], reads


def copy_bytes_per_second() -> float:
    source = torch.randint(1 << 62, ((4 << 30) // 8,), device="cuda")
    target = torch.empty_like(source)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(8):
        begin.record()
        torch.bitwise_not(source, out=target)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return 2 * source.nbytes / statistics.median(times) * 1e3


def run_case(model: Llama, case: Case, bandwidth: float, profile: Path | None) -> dict:
    engine = make_engine(model, case, prefill_chunk=16384)
    result: dict = vars(case) | {}
    if case.levels == (0,):
        finish_seconds(engine, case, 4, seed=1)  # lets libraries allocate
        long, short = (finish_seconds(engine, case, n, seed=n) for n in (128, 16))
        result["ms_per_step"] = (long - short) / 112 * 1e3
        result["output_tokens_per_s"] = case.batch * 128 / long
    seconds, reads = decode_step_seconds(engine, case, seed=7)
    kv_bytes = sum(num * size for num, size in zip(reads, engine.pool.page_bytes, strict=True))
    floor = (WEIGHT_BYTES + kv_bytes) / bandwidth
    result["step_ms_median"] = statistics.median(seconds) * 1e3
    result["step_ms_p99"] = sorted(seconds)[int(0.99 * len(seconds))] * 1e3
    result["step_ms_max"] = max(seconds) * 1e3
    result["pages_read"] = reads
    result["floor_ms"] = floor * 1e3
    result["share_of_floor"] = floor / statistics.median(seconds)
    if profile is not None:
        write_profile(engine, case, profile)
    return result


def add_mixed_over_pure(cases: list[dict]) -> None:
    """Of steps over mixed levels: their time over the mean of steps over one level, weighted by pages."""

    def kind(case: dict) -> tuple[int, ...]:
        return case["batch"], case["prompt"], case["page_size"]

    pure = {
        (*kind(case), *case["levels"]): case["step_ms_median"] for case in cases if len(case["levels"]) == 1
    }
    for case in cases:
        if len(case["levels"]) > 1:
            parts = [pure[(*kind(case), level)] for level in case["levels"]]
            case["over_pure_levels"] = case["step_ms_median"] / statistics.mean(parts)


def write_profile(engine: Engine, case: Case, directory: Path) -> None:
    """GPU time by kernel over ten decode steps."""
    submit(engine, case, 40, seed=8)
    while not all(request.is_decoding for request in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    step_down_all(engine, case.levels)
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(10):
            engine.step()
    while engine.has_work():
        engine.step()
    table = profiler.key_averages().table(sort_by="cuda_time_total", row_limit=30, max_name_column_width=90)
    name = f"b{case.batch}-{case.prompt}-l{''.join(map(str, case.levels))}.txt"
    (directory / name).write_text(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--quick", action="store_true", help="the first two cases only")
    parser.add_argument("--profile", type=Path, help="a folder for tables of GPU time by kernel")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bytes_per_second()
    device = torch.device("cuda")
    model = make_llama(LLAMA_3_1_8B, random_weights(LLAMA_3_1_8B, device), torch.bfloat16, device)
    results: dict = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_gb_per_s": bandwidth / 1e9,
        "cases": [],
    }
    for case in CASES[:2] if arguments.quick else CASES:
        results["cases"].append(run_case(model, case, bandwidth, arguments.profile))
        print(json.dumps(results["cases"][-1]), flush=True)
        torch.cuda.empty_cache()
    add_mixed_over_pure(results["cases"])
    print(json.dumps([case for case in results["cases"] if "over_pure_levels" in case]))
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
