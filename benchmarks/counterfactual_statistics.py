"""How far to trust a counterfactual whose traffic is drawn from live statistics: on recorded traffic, beside the same
question answered with the recording itself.

The recording is simulated under the present knobs and only looked at through the engine's statistics, every 15 s; from
these, and nothing else, traffic is drawn. Both then say what other knobs would have given.

    python -P benchmarks/counterfactual_statistics.py --traces FOLDER
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kvpilot.agent.counterfactual.statistics import TrafficStatistics
from kvpilot.agent.counterfactual.worker import WARM_UP, _replay, recorded, simulate
from kvpilot.engine.stats import StatsWindow
from kvpilot.env.replay.sim import make_simulation
from kvpilot.env.traces.compose import sample_sessions
from kvpilot.env.traces.files import write_trace
from kvpilot.env.traces.readers import ReadOptions, read_trace
from kvpilot.env.traces.trace import Trace

SCRAPE_SECONDS = 15.0
START = {"ttl_seconds": 60.0, "size_factor": 0.3, "max_batch": 32, "kv_level": 0}
CHANGES: dict[str, dict[str, float]] = {
    "kv_level=1": {"kv_level": 1},
    "kv_level=2": {"kv_level": 2},
    "max_batch=8": {"max_batch": 8},
    "max_batch=128": {"max_batch": 128},
    "size_factor=0.8": {"size_factor": 0.8},
    "ttl_seconds=0": {"ttl_seconds": 0.0},
}
FIGURES = ("hit_rate", "ttft_p99_seconds", "e2e_mean_seconds", "objective")


def cases(folder: Path) -> dict[str, tuple[Trace, float, float]]:
    """Name -> traffic, pool in GB, seconds of the window."""
    conversation = read_trace(folder / "mooncake" / "conversation_first40min.jsonl")
    agentic = read_trace(
        folder / "weka_agentic" / "sessions_train.tar.xz",
        options=ReadOptions(seed=1, sessions_per_second=0.02),
    )
    synthetic = read_trace(folder / "mooncake" / "synthetic_trace.jsonl")
    eighth, quarter = (sample_sessions(conversation, share, seed=1) for share in (0.125, 0.25))
    return {
        "conversation/8, pool far too small": (eighth, 20.0, 900.0),
        "conversation/8": (eighth, 50.0, 900.0),
        "conversation/4": (quarter, 80.0, 900.0),
        "synthetic multi-turn/4": (sample_sessions(synthetic, 0.25, seed=1), 50.0, 600.0),
        "coding agents": (agentic, 12.0, 1800.0),
    }


def statistics_of(path: Path, job: dict[str, Any]) -> dict[str, Any]:
    """What the sidecar would have noted of the recording's last part."""
    tail, since = recorded(path, job["window_seconds"])
    simulation = make_simulation(tail, _replay(job["present"], job))
    end = float(tail.arrival_seconds[-1])
    noted = TrafficStatistics(job["window_seconds"])
    before, now = simulation.engine.snapshot(), max(since, 0.0)
    while now < end:
        simulation.run(until=now)
        snapshot = simulation.engine.snapshot()
        noted.note(StatsWindow(start=before, end=snapshot))
        before, now = snapshot, now + SCRAPE_SECONDS
    return noted.describe()


def compare(name: str, trace: Trace, pool_gb: float, seconds: float, only: set[str]) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "traffic.parquet"
        write_trace(trace, path)
        job: dict[str, Any] = {
            "present": START,
            "proposed": START,
            "pool_bytes": pool_gb * 1e9,
            "trace": str(path),
            "profile": "h200-llama3-8b",
            "window_seconds": seconds,
            "slo": {"ttft_p99_seconds": 5.0},
        }
        statistics = statistics_of(path, job)
        for change, knobs in CHANGES.items():
            if only and change not in only:
                continue
            asked = {**job, "proposed": {**START, **knobs}}
            started = time.process_time()
            truth = simulate(asked)
            between = time.process_time()
            drawn = simulate({**asked, "statistics": statistics})
            took = (between - started, time.process_time() - between)
            rows.append({"traffic": name, "change": change, "recorded": truth, "drawn": drawn, "cpu": took})
            show(rows[-1])
    return rows


def show(row: dict[str, Any]) -> None:
    truth, drawn = row["recorded"], row["drawn"]
    cells = []
    for figure in FIGURES:
        a, b = (
            (one["present"][figure], one["proposed"][figure])
            if one["present"][figure] is not None
            else (0, 0)
            for one in (truth, drawn)
        )
        cells.append(f"{a[0]:.3g} -> {a[1]:.3g} / {b[0]:.3g} -> {b[1]:.3g}")
    print(f"| {row['traffic']} | {row['change']} | {' | '.join(cells)} |", flush=True)
    print(
        f"    requests {truth['requests']} / {drawn['requests']}, measured hit rate {drawn['hit_rate_measured']:.3f}, "
        f"CPU {row['cpu'][0]:.1f} / {row['cpu'][1]:.1f} s",
        file=sys.stderr,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--traces", type=Path, required=True, help="folder of recorded traces (docs/traces.md)"
    )
    parser.add_argument("--case", action="append", default=[], help="only traffic whose name begins so")
    parser.add_argument("--change", action="append", default=[], help="only these")
    parser.add_argument("--out", type=Path, help="all figures as JSON")
    arguments = parser.parse_args()
    print(f"window: {WARM_UP:g} of warm-up before each; {', '.join(FIGURES)}: recorded / drawn")
    rows = []
    for name, (trace, pool_gb, seconds) in cases(arguments.traces).items():
        if not arguments.case or name.startswith(tuple(arguments.case)):
            rows += compare(name, trace, pool_gb, seconds, set(arguments.change))
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
