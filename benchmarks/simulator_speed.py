"""How fast the simulator is: requests per CPU second on one core, cost against length, where the time goes, and Vidur.

    benchmarks/simulator_speed.py conversation_first40min.jsonl [--vidur-python VENV/bin/python] [--quick]

The trace is sampled to one GPU (1/8 of the sessions) in 512-token pages on the H200 profile. Counted are
the CPU seconds of this process, from building the simulation to the last answer, statistics included; reading the
trace is not. Vidur gets the same arrivals and lengths and the same step times (see contenders/vidur_worker.py); it
has no KV precision, retention or cache-aware admission to account for. `KVPILOT_COMPILED=0` runs the sources instead
of what was compiled from them, and shows where the time goes by function.
"""

import argparse
import cProfile
import csv
import io
import json
import pstats
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.resources import files
from pathlib import Path

from kvpilot.engine import compiled
from kvpilot.engine.config import Knobs
from kvpilot.engine.errors import KVPilotError
from kvpilot.env.replay.sim import SimReplay, make_simulation
from kvpilot.env.simulator.latency import load_profile
from kvpilot.env.slo import Slo
from kvpilot.env.traces.compose import concatenate, sample_sessions
from kvpilot.env.traces.readers import read_trace
from kvpilot.env.traces.trace import Trace

PROFILE = "h200-llama3-8b"
PAGE_TOKENS = 512
SAMPLE = 1 / 8


def simulated_cpu_seconds(trace: Trace, knobs: Knobs) -> float:
    """Of one replay, from its building to its last answer."""
    profile = load_profile(PROFILE)
    config = profile.engine_config(page_size=PAGE_TOKENS, knobs=knobs)
    begin = time.process_time()
    simulation = make_simulation(trace, SimReplay(profile=profile, engine=config, slo=Slo()))
    simulation.run()
    seconds = time.process_time() - begin
    assert len(simulation.finished) + len(simulation.refused) == len(trace)
    return seconds


def where_time_goes(trace: Trace, knobs: Knobs, top: int = 12) -> list[tuple[str, float]]:
    """Functions with the largest share of time spent in themselves, under the profiler."""
    profiler = cProfile.Profile()
    profiler.enable()
    simulated_cpu_seconds(trace, knobs)
    profiler.disable()
    stats = pstats.Stats(profiler, stream=io.StringIO())
    own = {(Path(key[0]).name, key[2]): value[2] for key, value in stats.stats.items()}  # pyright: ignore
    total = sum(own.values())
    largest = sorted(own.items(), key=lambda item: -item[1])[:top]
    return [(f"{file}:{name}", seconds / total) for (file, name), seconds in largest]


def vidur_result(trace: Trace, python: str) -> dict:
    """What the worker measured."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["Date", "Time", "PromptTokenCount", "CompletionTokenCount"])
            columns = (trace.arrival_seconds, trace.prompt_tokens, trace.output_tokens)
            writer.writerows(("d", *row) for row in zip(*(c.tolist() for c in columns), strict=True))
        worker = Path(__file__).parent / "contenders" / "vidur_worker.py"
        profile = files("kvpilot.env.profiles").joinpath(f"{PROFILE}.json")
        command = [python, str(worker), str(path), str(profile)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"the Vidur worker failed:\n{done.stderr[-2000:]}")
        return json.loads(done.stdout.splitlines()[-1])


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number >= 1")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--vidur-python", help="Python of an environment with `pip install vidur`")
    parser.add_argument("--runs", type=at_least_one, default=3, help="the fastest counts")
    parser.add_argument("--quick", action="store_true", help="up to 10k requests only")
    parser.add_argument("--json", type=Path, help="write the figures")
    args = parser.parse_args()
    if args.vidur_python and shutil.which(args.vidur_python) is None:
        parser.error(f"--vidur-python {args.vidur_python}: no such program")
    if args.json and (args.json.is_dir() or not args.json.parent.is_dir()):
        parser.error(f"--json {args.json}: expected a file in a folder that exists")
    try:
        measure(args)
    except KVPilotError as error:
        parser.error(str(error))


def measure(args: argparse.Namespace) -> None:
    """Prints the figures. Raises KVPilotError for a trace that cannot be read or replayed."""
    trace = sample_sessions(read_trace(args.trace), SAMPLE, seed=1)
    print(f"{len(trace)} requests, {trace.prompt_tokens.sum() / trace.duration_seconds:.0f} prompt tokens/s")

    settings = {
        "LRU, full precision": Knobs(max_batch=64),
        "all four knobs": Knobs(max_batch=64, kv_level=2, size_factor=0.6, ttl_seconds=120.0),
    }
    is_compiled = compiled.is_in_use()
    print(f"bookkeeping: {'compiled' if is_compiled else 'interpreted'}")
    figures: dict = {"compiled": is_compiled, "requests_per_cpu_second": {}, "by_length": {}, "profile": {}}
    for name, knobs in settings.items():
        seconds = min(simulated_cpu_seconds(trace, knobs) for _ in range(args.runs))
        figures["requests_per_cpu_second"][name] = len(trace) / seconds
        print(f"{name}: {len(trace) / seconds:,.0f} requests/s ({seconds:.3f} CPU s)")
    print("cost by length of the trace (copies one after another, blocks of their own):")
    for copies in (1, 10) if args.quick else (1, 3, 10, 30, 103):
        long = concatenate([trace] * copies)
        seconds = simulated_cpu_seconds(long, settings["LRU, full precision"])
        figures["by_length"][len(long)] = 1e6 * seconds / len(long)
        print(f"  {len(long):>7,} requests: {1e6 * seconds / len(long):6.0f} us each")
    print("where the time goes (share of own time, under the profiler):")
    for name, share in where_time_goes(trace, settings["LRU, full precision"]):
        figures["profile"][name] = share
        print(f"  {100 * share:5.1f} % {name}")
    if args.vidur_python:
        vidur = vidur_result(trace, args.vidur_python)
        rate = vidur["requests"] / vidur["cpu_seconds"]
        ours = figures["requests_per_cpu_second"]["LRU, full precision"]
        figures["vidur"] = vidur | {"ratio": ours / rate}
        print(
            f"Vidur {vidur['version']}: {rate:,.0f} requests/s ({vidur['cpu_seconds']:.2f} CPU s): 1/{ours / rate:.0f}"
        )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
