"""The whole engine on a GPU under load while its knobs change: nothing lost, books balanced, memory flat.

    python benchmarks/gpu_soak.py [--seconds 120] [--out results.json]

First 64 sequences decode in a pool that is full of idle pages, `kv_level` goes from 0 to 2, and the longest step
after it is set against the median before. Then requests with shared prefixes arrive without end while all four
knobs are drawn anew every twenty steps; half of them are greedy. Llama-3.1-8B shapes with random weights.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch
from gpu_decode import LLAMA_3_1_8B, SLOT_BYTES

from kvpilot.engine.config import EngineConfig, Knobs
from kvpilot.engine.engine import Engine
from kvpilot.engine.factory import build_engine
from kvpilot.engine.kv.pool import PageState
from kvpilot.engine.model.device import make_llama
from kvpilot.engine.model.dummy import random_weights
from kvpilot.engine.model.llama import Llama
from kvpilot.engine.request import FinishReason, SamplingParams

CEILING = 96


def make_engine(model: Llama, num_slots: int) -> Engine:
    config = EngineConfig(
        pool_bytes=num_slots * SLOT_BYTES,
        prefill_chunk=2048,
        max_batch_ceiling=CEILING,
        max_model_len=4096,
        max_waiting=512,
        knobs=Knobs(max_batch=64),
    )
    return build_engine(model, config)


def step(engine: Engine) -> float:
    start = time.perf_counter()
    engine.step()
    return time.perf_counter() - start


def knob_change(engine: Engine) -> dict:
    """Steps of 64 decoding sequences before and after `kv_level` 0 -> 2."""
    rng = random.Random(0)

    def submit(name: str, length: int, max_tokens: int) -> None:
        prompt = [rng.randrange(1, 100_000) for _ in range(length)]
        engine.add_request(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))

    num_slots = engine.pool.num_slots
    for i in range(num_slots // 32):  # idle pages fill the pool
        submit(f"idle-{i}", 1024, 1)
        while engine.has_work():
            engine.step()
    for i in range(64):
        submit(f"busy-{i}", 512, 800)
    while engine.scheduler.waiting or not all(r.is_decoding for r in engine.scheduler.running):
        engine.step()
    capacity = [engine.pool.capacity_pages(level) * engine.config.page_size for level in range(3)]
    before = [step(engine) for _ in range(220)][20:]
    engine.patch_knobs({"kv_level": 2})
    after = [step(engine) for _ in range(400)]
    stepped_down = sum(engine.pool.num_pages(state, level) for state in PageState for level in (1, 2))
    engine.check_integrity()
    while engine.has_work():
        engine.step()
    return {
        "median_before_ms": statistics.median(before) * 1e3,
        "max_before_ms": max(before) * 1e3,
        "median_after_ms": statistics.median(after) * 1e3,
        "max_after_ms": max(after) * 1e3,
        "max_over_median": max(after) / statistics.median(before),
        "pages_stepped_down": stepped_down,
        "capacity_tokens": capacity,
        "capacity_ratio": capacity[2] / capacity[0],
    }


def soak(engine: Engine, seconds: float) -> dict:
    rng = random.Random(1)
    graphs = engine._runner.graphs  # pyright: ignore[reportAttributeAccessIssue]
    num_captured = graphs.num_captured
    prefixes = [[rng.randrange(1, 100_000) for _ in range(1024)] for _ in range(64)]
    wanted: dict[str, int] = {}
    finished = num_changes = num_steps = 0
    memory = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or engine.has_work():
        while time.monotonic() < end and len(engine.scheduler.waiting) < 24:
            name = f"soak-{len(wanted)}"
            own = [rng.randrange(1, 100_000) for _ in range(rng.randrange(1, 400))]
            wanted[name] = rng.randrange(1, 200)
            prompt = rng.choice(prefixes)[: 32 * rng.randrange(33)] + own
            temperature = rng.choice([0.0, 0.8])
            sampling = SamplingParams(
                max_tokens=wanted[name], ignore_eos=True, temperature=temperature, top_p=0.95
            )
            engine.add_request(name, prompt, sampling)
        if num_steps % 20 == 0:
            num_changes += 1
            engine.patch_knobs(
                {
                    "kv_level": rng.randrange(3),
                    "max_batch": rng.randrange(1, CEILING + 1),
                    "ttl_seconds": rng.choice([0.0, 5.0, 60.0]),
                    "size_factor": rng.random(),
                }
            )
            engine.check_integrity()
            memory.append(torch.cuda.memory_reserved())
        for output in engine.step():
            if output.finish_reason is not None:
                assert output.finish_reason == FinishReason.LENGTH, output.finish_reason
                assert output.request.num_output_tokens == wanted[output.request.request_id]
                finished += 1
        num_steps += 1
    engine.check_integrity()
    assert finished == len(wanted), (finished, len(wanted))
    values = engine.snapshot().values
    names = ("pages_stepped_down", "pages_moved", "preemptions", "pages_released")
    return {
        "seconds": seconds,
        "steps": num_steps,
        "requests": finished,
        "tokens": sum(wanted.values()),
        "knob_changes": num_changes,
        "counters": {f"{name}{labels}": v for (name, labels), v in values.items() if name in names},
        "graphs_captured_after_warm_up": graphs.num_captured - num_captured,
        "reserved_bytes_after_a_tenth": memory[len(memory) // 10],
        "reserved_bytes_at_the_end": memory[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--seconds", type=float, default=120)
    arguments = parser.parse_args()
    device = torch.device("cuda")
    model = make_llama(LLAMA_3_1_8B, random_weights(LLAMA_3_1_8B, device), torch.bfloat16, device)
    result = {
        "device": torch.cuda.get_device_name(),
        "knob_change": knob_change(make_engine(model, 4500)),
    }
    torch.cuda.empty_cache()
    print(json.dumps(result), flush=True)
    result["soak"] = soak(make_engine(model, 1500), arguments.seconds)
    print(json.dumps(result["soak"]))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
