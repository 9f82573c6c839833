"""A simulation as a child process: a job as JSON on stdin, its figures as JSON on stdout. See `counterfactual`."""

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvpilot.engine.config import KNOB_NAMES, Knobs
from kvpilot.engine.errors import ConfigError, KVPilotError
from kvpilot.env.replay.result import DONE, ReplayResult
from kvpilot.env.replay.sim import SimReplay, replay_simulated
from kvpilot.env.simulator.latency import load_profile
from kvpilot.env.slo import Slo
from kvpilot.env.traces.readers import read_trace
from kvpilot.env.traces.trace import Trace
from kvpilot.env.tuning.reward import RewardWeights, relative_loss

NICEST = 19
WARM_UP = 1.0  # windows before the one that counts: a cache is not cold in the middle of the day


def simulate(job: dict[str, Any]) -> dict[str, Any]:
    """`present` and `proposed` figures over the last `window_seconds` of the trace; ConfigError for an empty one."""
    trace = read_trace(Path(job["trace"]), skip_bad=True)  # its last line may be half written
    seconds = float(job["window_seconds"])
    end = float(trace.arrival_seconds[-1])
    tail = trace.select(trace.arrival_seconds >= end - (1 + WARM_UP) * seconds)
    counts = tail.arrival_seconds >= end - seconds
    if not counts.any():
        raise ConfigError(f"trace={job['trace']!r} is empty: nothing to simulate")
    first = float(tail.arrival_seconds[0])
    tail = tail.replace(arrival_seconds=tail.arrival_seconds - first)
    figures = {
        name: _figures(tail, end - seconds - first, job[name], job) for name in ("present", "proposed")
    }
    return {"requests": int(counts.sum()), **figures}


def _figures(
    trace: Trace, since: float, knobs: dict[str, float], job: dict[str, Any]
) -> dict[str, float | None]:
    profile = load_profile(job["profile"])
    config = profile.engine_config()
    if job["pool_bytes"] is not None:
        config = config.with_(pool_bytes=int(job["pool_bytes"]))
    ceiling = max(config.max_batch_ceiling, int(knobs["max_batch"]))
    chosen = replace(Knobs(), **{name: knobs[name] for name in KNOB_NAMES if name in knobs})
    slo = Slo(
        ttft_seconds=job["slo"].get("ttft_p99_seconds") or Slo().ttft_seconds,
        inter_token_seconds=job["slo"].get("inter_token_p99_seconds") or Slo().inter_token_seconds,
    )
    replay = SimReplay(
        profile=profile,
        engine=config.with_(max_batch_ceiling=ceiling, knobs=chosen),
        slo=slo,
        window_seconds=60.0,
    )
    return figures_of(replay_simulated(trace, replay), since, slo)


def figures_of(result: ReplayResult, since: float, slo: Slo) -> dict[str, float | None]:
    """Over the requests that arrived at `since` seconds or later and were answered."""
    rows = result.requests
    columns = {
        name: np.array(rows[name], dtype=float)
        for name in ("arrival_seconds", "ttft_seconds", "inter_token_seconds", "e2e_seconds")
    }
    late = columns["arrival_seconds"] >= since
    done = late & np.array([status == DONE for status in rows["status"]], dtype=bool)
    prompt, cached = (np.array(rows[name], dtype=float)[done] for name in ("prompt_tokens", "cached_tokens"))
    ttft, gap = columns["ttft_seconds"][done], columns["inter_token_seconds"][done]
    hit_rate = float(cached.sum() / prompt.sum()) if prompt.sum() else math.nan
    shares = [float((ttft > slo.ttft_seconds).mean()), float((gap > slo.inter_token_seconds).mean())]
    weights = RewardWeights()
    loss = result.summary.get("quality_loss", 0.0)
    objective = (
        weights.hits * hit_rate
        - weights.slo * max(shares)
        - weights.quality * relative_loss(loss if math.isfinite(loss) else None)
    )
    figures = {
        "hit_rate": hit_rate,
        "ttft_p99_seconds": float(np.percentile(ttft, 99)) if len(ttft) else math.nan,
        "e2e_mean_seconds": float(columns["e2e_seconds"][done].mean()) if len(ttft) else math.nan,
        "objective": objective,
        "answered_share": float(done.sum() / late.sum()),
    }
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}


def main() -> int:
    os.nice(NICEST)
    try:
        print(json.dumps(simulate(json.load(sys.stdin)), allow_nan=False))
    except KVPilotError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
