"""A replay over time: one row per window, from two snapshots of the engine's statistics."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from kvpilot.engine.stats import StatsSnapshot, StatsWindow
from kvpilot.env.observation import quality_loss

IDLE_AND_LIVE = ("live", "retained", "unprotected")


def window_columns(snapshots: Sequence[StatsSnapshot]) -> dict[str, list[Any]]:
    """Columns of `window_row` for every two neighbours."""
    rows = [window_row(StatsWindow(start=a, end=b)) for a, b in pairwise(snapshots) if b.time > a.time]
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


def window_row(window: StatsWindow) -> dict[str, Any]:
    """Rates, quantiles and the state at the end; nan where nothing happened.

    `evictions` by cause: pages released unprotected, or retained and taken for one of three reasons.
    `pool_tokens` and `pool_bytes` by state and level. `pages_read` by level, in decode steps.
    """
    end, seconds = window.end, window.seconds
    ttft, gap = window.histogram("time_to_first_token_seconds"), window.histogram("inter_token_seconds")
    levels = [labels[0] for name, labels in end.values if name == "pool_capacity_tokens"]
    return {
        "end_seconds": end.time,
        "seconds": seconds,
        "arrived": window.total("requests_received"),
        "finished": window.total("requests_finished"),
        "rejected": window.total("requests_rejected"),
        "query_tokens": window.total("prefix_query_tokens"),
        "hit_tokens": window.total("prefix_hit_tokens"),
        "prefill_tokens": window.total("prefill_tokens"),
        "generated_tokens": window.total("generation_tokens"),
        "hit_rate": window.hit_rate,
        "ttft_p50_seconds": ttft.quantile(0.5),
        "ttft_p99_seconds": ttft.quantile(0.99),
        "gap_p50_seconds": gap.quantile(0.5),
        "gap_p99_seconds": gap.quantile(0.99),
        "running": end.value("requests_running"),
        "waiting": end.value("requests_waiting"),
        "preemptions": window.total("preemptions"),
        "evictions": evictions(window),
        "expired": window.total("pages_expired"),
        "over_budget": window.total("pages_over_budget"),
        "stepped_down": {level: window.delta("pages_stepped_down", level) for level in levels[1:]},
        "pages_read": {level: window.delta("pages_read", level) for level in levels},
        "pool_bytes": {
            state: {level: end.values.get(("page_bytes", (state, level)), 0) for level in levels}
            for state in IDLE_AND_LIVE
        },
        "free_bytes": end.value("pool_free_bytes"),
        "quality_loss": quality_loss(window),
        "knobs": {labels[0]: value for (name, labels), value in end.values.items() if name == "knob"},
    }


def evictions(window: StatsWindow) -> dict[str, float]:
    """Pages released, by cause."""
    taken = {
        reason: window.delta("retained_taken", reason) for reason in ("idle_engine", "growth", "starving")
    }
    return {"unprotected": window.delta("pages_released", "unprotected"), **taken}
