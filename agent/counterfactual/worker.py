"""A simulation as a child process: a job as JSON on stdin, its figures as JSON on stdout. See `counterfactual`."""

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvpilot.agent.counterfactual.traffic import draw_traffic
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
    """`present` and `proposed` figures over the traffic's last part; before it the cache warms up. The traffic is a
    recorded `trace`, or is drawn from `statistics`. Raises ConfigError where there is none."""
    if job.get("statistics") is not None:
        return _simulate_drawn(job)
    tail, since = recorded(Path(job["trace"]), float(job["window_seconds"]))
    return _compared(tail, since, job)


def recorded(path: Path, seconds: float) -> tuple[Trace, float]:
    """The end of a trace from time 0, and when the last `seconds` of it begin."""
    trace = read_trace(path, skip_bad=True)  # its last line may be half written
    end = float(trace.arrival_seconds[-1])
    tail = trace.select(trace.arrival_seconds >= end - (1 + WARM_UP) * seconds)
    if not (tail.arrival_seconds >= end - seconds).any():
        raise ConfigError(f"trace={str(path)!r} is empty: nothing to simulate")
    first = float(tail.arrival_seconds[0])
    return tail.replace(arrival_seconds=tail.arrival_seconds - first), end - seconds - first


def _simulate_drawn(job: dict[str, Any]) -> dict[str, Any]:
    statistics, replay = job["statistics"], _replay(job["present"], job)
    trace = draw_traffic(
        statistics, page_size=replay.engine.page_size, max_tokens=replay.model.max_len, warm_up=WARM_UP
    )
    since = WARM_UP * sum(seconds for seconds, _ in statistics["arrivals"])
    return {**_compared(trace, since, job), "hit_rate_measured": statistics["hit_rate"]}


def _compared(trace: Trace, since: float, job: dict[str, Any]) -> dict[str, Any]:
    requests = int((trace.arrival_seconds >= since).sum())
    figures = {name: _figures(trace, since, job[name], job) for name in ("present", "proposed")}
    return {"requests": requests, **figures}


def _figures(
    trace: Trace, since: float, knobs: dict[str, float], job: dict[str, Any]
) -> dict[str, float | None]:
    replay = _replay(knobs, job)
    return figures_of(replay_simulated(trace, replay), since, replay.slo)


def _replay(knobs: dict[str, float], job: dict[str, Any]) -> SimReplay:
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
    return SimReplay(
        profile=profile,
        engine=config.with_(max_batch_ceiling=ceiling, knobs=chosen),
        slo=slo,
        window_seconds=60.0,
    )


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
