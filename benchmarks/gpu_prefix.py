"""Requests that share most of their prompt, on a GPU: 256 of 2176 tokens, of which 2048 are shared, 32 new tokens.

    python benchmarks/gpu_prefix.py [--out results.json]

Requests per second from the first submission to the last token, with the prefix cache and without (every request
has a cache salt of its own). The shared part is cached before the clock starts, as a system prompt would be.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from gpu_decode import LLAMA_3_1_8B, SLOT_BYTES

from kvpilot.engine.config import EngineConfig, Knobs
from kvpilot.engine.engine import Engine
from kvpilot.engine.factory import build_engine
from kvpilot.engine.model.device import make_llama
from kvpilot.engine.model.dummy import random_weights
from kvpilot.engine.model.llama import Llama
from kvpilot.engine.request import SamplingParams

NUM_REQUESTS, SHARED, OWN, NEW = 256, 2048, 128, 32
SAMPLING = SamplingParams(max_tokens=NEW, ignore_eos=True)


def make_engine(model: Llama, prefill_chunk: int) -> Engine:
    pages = NUM_REQUESTS * -(-(SHARED + OWN + NEW) // 32)
    config = EngineConfig(
        pool_bytes=min((pages + 600) * SLOT_BYTES, 90 << 30),
        prefill_chunk=prefill_chunk,
        max_batch_ceiling=NUM_REQUESTS,
        max_model_len=SHARED + OWN + 2 * NEW,
        knobs=Knobs(max_batch=NUM_REQUESTS),
    )
    return build_engine(model, config)


def run(engine: Engine, num_requests: int, *, is_cached: bool, seed: int) -> dict:
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> list[int]:
        return torch.randint(1, 100_000, (count,), generator=generator).tolist()

    def submit(name: str, prompt: list[int], salt: str) -> None:
        engine.add_request(f"{seed}-{name}", prompt, SAMPLING, cache_salt=salt)

    shared = draw(SHARED)
    if is_cached:
        submit("first", [*shared, 1], str(seed))
        finish(engine)
    prompts = [[*shared, *draw(OWN)] for _ in range(num_requests)]
    torch.cuda.synchronize()
    start = time.perf_counter()
    for i, prompt in enumerate(prompts):
        submit(str(i), prompt, str(seed) if is_cached else f"{seed}-{i}")
    steps = finish(engine)
    seconds = time.perf_counter() - start
    return {
        "requests": num_requests,
        "requests_per_s": num_requests / seconds,
        "seconds": seconds,
        "steps": len(steps),
        "prefill_seconds": sum(t for t, mixed in steps if mixed),
        "decode_seconds": sum(t for t, mixed in steps if not mixed),
    }


def finish(engine: Engine) -> list[tuple[float, bool]]:
    """Seconds of each step, and whether somebody was still prefilling after it."""
    steps = []
    while engine.has_work():
        start = time.perf_counter()
        engine.step()
        scheduler = engine.scheduler
        is_mixed = bool(scheduler.waiting) or any(not r.is_decoding for r in scheduler.running)
        steps.append((time.perf_counter() - start, is_mixed))
    torch.cuda.synchronize()
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--prefill-chunk", type=int, default=8192)
    arguments = parser.parse_args()
    device = torch.device("cuda")
    model = make_llama(LLAMA_3_1_8B, random_weights(LLAMA_3_1_8B, device), torch.bfloat16, device)
    engine = make_engine(model, arguments.prefill_chunk)
    run(engine, NUM_REQUESTS, is_cached=True, seed=1)  # compiles
    on = run(engine, NUM_REQUESTS, is_cached=True, seed=2)
    off = run(engine, NUM_REQUESTS, is_cached=False, seed=3)
    result = {
        "device": torch.cuda.get_device_name(),
        "cache_on": on,
        "cache_off": off,
        "ratio": on["requests_per_s"] / off["requests_per_s"],
    }
    print(json.dumps(result, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
