"""The figures that describe a trace."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from kvpilot.env.traces.blocks import Floats, Ints
from kvpilot.env.traces.compose import session_starts
from kvpilot.env.traces.reuse import (
    HitRateCurve,
    find_runs,
    hit_rate_curve,
    infinite_hit_rate,
    reuse_interval_seconds,
)
from kvpilot.env.traces.trace import Trace

PERCENTILES = (1, 10, 25, 50, 75, 90, 99)
NUM_WINDOWS = 80
TURNS_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class TraceSummary:
    """All of `autotune trace info`; plain values, so that `asdict` is JSON. Percentiles are keyed "p1" to "p99"."""

    requests: int
    sessions: int
    tenants: int
    duration_seconds: float
    requests_per_second: float
    input_tokens_per_second: float
    output_tokens_per_second: float
    arrival_cv: float  # standard deviation / mean of the time between arrivals; 1 for Poisson
    input_tokens: dict[str, float]
    output_tokens: dict[str, float]
    turns_per_session: dict[str, float]
    next_turn_share: list[float]  # P(another turn | this was turn 1, 2, ...)
    turn_gap_seconds: dict[str, float]  # arrival to arrival within a session
    block_size: int
    blocks: int  # looked up
    distinct_blocks: int
    used_once_share: float  # of the distinct blocks
    infinite_hit_rate: float  # of the blocks looked up, in a cache that never evicts
    reuse_interval_seconds: dict[str, float]  # by block
    reuse_interval_cdf: dict[str, list[float]]  # seconds, share
    hit_rate_blocks: list[int]  # cache sizes
    hit_rate_lru: list[float]
    hit_rate_optimal: list[float]
    over_time: dict[str, list[float]]  # per window: start_seconds, requests_per_second, ...
    provenance: list[Any]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize(
    trace: Trace,
    *,
    sizes: list[int] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> TraceSummary:
    """Figures of a trace with at least one request. `progress` gets a phase's name, done and total."""

    def step(name: str) -> Callable[[int, int], None] | None:
        return None if progress is None else partial(progress, name)

    runs = find_runs(trace, step("reuse"))
    curve = hit_rate_curve(trace, runs, sizes, step("hit-rate curve"))
    intervals, weights = reuse_interval_seconds(trace, runs)
    distinct, uses = np.unique(trace.block_ids, return_counts=True)
    first, index = session_starts(trace)
    turns = np.bincount(index, minlength=len(first))
    seconds = max(trace.duration_seconds, 1e-9)
    gaps = np.diff(trace.arrival_seconds)
    return TraceSummary(
        requests=len(trace),
        sessions=len(first),
        tenants=len(np.unique(trace.tenant)),
        duration_seconds=trace.duration_seconds,
        requests_per_second=len(trace) / seconds,
        input_tokens_per_second=float(trace.prompt_tokens.sum() / seconds),
        output_tokens_per_second=float(trace.output_tokens.sum() / seconds),
        arrival_cv=float(gaps.std() / gaps.mean()) if len(gaps) and gaps.mean() > 0 else 0.0,
        input_tokens=percentiles(trace.prompt_tokens),
        output_tokens=percentiles(trace.output_tokens),
        turns_per_session=percentiles(turns),
        next_turn_share=_next_turn_share(trace),
        turn_gap_seconds=percentiles(_turn_gaps(trace)),
        block_size=trace.block_size,
        blocks=len(trace.block_ids),
        distinct_blocks=len(distinct),
        used_once_share=float((uses == 1).mean()) if len(uses) else 0.0,
        infinite_hit_rate=infinite_hit_rate(trace, runs),
        reuse_interval_seconds=percentiles(intervals, weights),
        reuse_interval_cdf=_cdf(intervals, weights),
        **_curve_fields(curve),
        over_time=_over_time(trace),
        provenance=list(trace.provenance),
    )


def percentiles(values: Floats | Ints, weights: Ints | None = None) -> dict[str, float]:
    """Percentiles (the smallest value that so many do not exceed); empty for no values."""
    if not len(values):
        return {}
    order = np.argsort(values)
    mass = np.cumsum(np.ones(len(values)) if weights is None else weights[order])
    places = np.searchsorted(mass, np.array(PERCENTILES) / 100 * mass[-1])
    return {f"p{p}": float(values[order[k]]) for p, k in zip(PERCENTILES, places, strict=True)}


def _cdf(values: Floats, weights: Ints, num_points: int = 100) -> dict[str, list[float]]:
    if not len(values):
        return {"seconds": [], "share": []}
    order = np.argsort(values)
    mass = np.cumsum(weights[order])
    shares = np.linspace(0, 1, num_points + 1)[1:]
    places = np.searchsorted(mass, shares * mass[-1] - 1e-9)
    return {"seconds": values[order[places]].tolist(), "share": shares.tolist()}


def _next_turn_share(trace: Trace) -> list[float]:
    """Of the sessions that reach a turn, the share that reaches the next."""
    sessions, index = np.unique(trace.session, return_inverse=True)
    last = np.zeros(len(sessions), dtype=np.int64)
    np.maximum.at(last, index, trace.turn)
    reached = [int((last >= turn).sum()) for turn in range(1, TURNS_SHOWN + 2)]
    return [after / before for before, after in pairwise(reached) if before]


def _turn_gaps(trace: Trace) -> Floats:
    order = np.argsort(trace.session, kind="stable")  # by session, then by arrival
    same = np.diff(trace.session[order]) == 0
    return np.diff(trace.arrival_seconds[order])[same]


def _curve_fields(curve: HitRateCurve) -> dict[str, Any]:
    return {
        "hit_rate_blocks": curve.num_blocks,
        "hit_rate_lru": curve.lru,
        "hit_rate_optimal": curve.optimal,
    }


def _over_time(trace: Trace) -> dict[str, list[float]]:
    start, seconds = trace.arrival_seconds[0], max(trace.duration_seconds, 1.0)
    width = seconds / NUM_WINDOWS
    window = np.minimum(((trace.arrival_seconds - start) / width).astype(np.int64), NUM_WINDOWS - 1)
    sums = {
        "requests_per_second": None,
        "input_tokens_per_second": trace.prompt_tokens,
        "output_tokens_per_second": trace.output_tokens,
    }
    series = {
        name: (np.bincount(window, values, NUM_WINDOWS) / width).tolist() for name, values in sums.items()
    }
    return {"start_seconds": (start + width * np.arange(NUM_WINDOWS)).tolist(), **series}
