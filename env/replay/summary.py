"""The figures of a replay."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvpilot.env.replay.result import DONE
from kvpilot.env.slo import Slo

PERCENTILES = (50, 90, 99)


def summarize(
    requests: dict[str, list[Any]],
    windows: dict[str, list[Any]],
    slo: Slo,
    *,
    reasons: Mapping[str, Mapping[str, int]] | None = None,
) -> dict[str, Any]:
    """Percentiles over finished requests; goodput counts good requests against all that were sent.

    A request is sent if it arrived before the replay ended; those cut off count in no percentile and as not good.
    `reasons` says of a status why and how often. Rates are over the time from the first arrival to the last answer.
    """
    done = np.array([status == DONE for status in requests["status"]], dtype=bool)
    columns = {
        name: np.array(requests[name], dtype=float)[done]
        for name in ("queue_seconds", "ttft_seconds", "inter_token_seconds", "e2e_seconds")
    }
    seconds = _duration(requests)
    prompt, cached, output = (
        np.array(requests[name], dtype=float)[done]
        for name in ("prompt_tokens", "cached_tokens", "output_tokens")
    )
    is_good = slo.is_met(columns["ttft_seconds"], columns["inter_token_seconds"])
    num_good = int(np.count_nonzero(is_good))
    summary: dict[str, Any] = {
        "requests": len(done),
        "status": dict(Counter(requests["status"])),
        "reasons": {status: dict(counts) for status, counts in (reasons or {}).items() if counts},
        "seconds": seconds,
        "requests_per_second": int(done.sum()) / seconds if seconds else np.nan,
        "output_tokens_per_second": float(output.sum()) / seconds if seconds else np.nan,
        "goodput_share": num_good / len(done) if len(done) else np.nan,
        "goodput_per_second": num_good / seconds if seconds else np.nan,
        "hit_rate": float(cached.sum() / prompt.sum()) if prompt.sum() else np.nan,
    }
    for name, values in columns.items():
        summary[name] = percentiles(values)
    return summary | _totals(windows)


def percentiles(values: np.ndarray) -> dict[str, float]:
    """p50, p90, p99 and the mean of what is known; empty if nothing is."""
    known = values[np.isfinite(values)]
    if not len(known):
        return {}
    cuts = np.percentile(known, PERCENTILES)
    named = {f"p{p}": float(cut) for p, cut in zip(PERCENTILES, cuts, strict=True)}
    return named | {"mean": float(known.mean())}


def _duration(requests: dict[str, list[Any]]) -> float:
    arrivals = np.array(requests["arrival_seconds"], dtype=float)
    if not len(arrivals):
        return 0.0
    ends = arrivals + np.nan_to_num(np.array(requests["e2e_seconds"], dtype=float))
    return float(ends.max() - arrivals.min())


def _totals(windows: dict[str, list[Any]]) -> dict[str, Any]:
    """What only the engine's own statistics know."""
    if not windows:
        return {}
    evictions: Counter[str] = Counter()
    stepped_down: Counter[str] = Counter()
    for row in windows["evictions"]:
        evictions.update(row)
    for row in windows["stepped_down"]:
        stepped_down.update(row)
    weights = np.array([sum(row.values()) for row in windows["pages_read"]], dtype=float)
    loss = np.array([np.nan if v is None else v for v in windows["quality_loss"]], dtype=float)
    known = np.isfinite(loss) & (weights > 0)
    return {
        "evictions": dict(evictions),
        "stepped_down": dict(stepped_down),
        "preemptions": sum(windows["preemptions"]),
        "quality_loss": float(np.average(loss[known], weights=weights[known])) if known.any() else np.nan,
    }
