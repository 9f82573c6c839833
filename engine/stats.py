"""One set of statistics for three readers: the simulator (in process), a scrape of /metrics, PromQL.

`METRICS` names everything that is measured. A `StatsRecorder` collects, a `StatsSnapshot` is an immutable
copy, and the difference of two snapshots is a `StatsWindow` with rates and quantiles.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

LATENCY_BUCKETS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0),
    *(15.0, 20.0, 30.0, 45.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
)
AGE_BUCKETS = (0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 21600, 86400)


class Metric(NamedTuple):
    """`kind` is counter, gauge or histogram; `labels` are the label names in order."""

    kind: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


METRICS: dict[str, Metric] = {
    # requests
    "requests_running": Metric("gauge", "Requests admitted: prefilling or decoding"),
    "requests_waiting": Metric("gauge", "Requests waiting for admission"),
    "waiting_mean_seconds": Metric("gauge", "Mean time that the waiting requests have waited so far"),
    "waiting_oldest_seconds": Metric("gauge", "Time that the oldest waiting request has waited so far"),
    "requests_received": Metric("counter", "Requests accepted into the queue"),
    "requests_rejected": Metric("counter", "Requests refused because the queue was full"),
    "requests_finished": Metric("counter", "Requests ended", ("reason",)),
    "admissions": Metric("counter", "Requests admitted (again after each preemption)"),
    "admissions_forced": Metric("counter", "Admissions of starving requests that took retained pages"),
    "preemptions": Metric("counter", "Running requests sent back to the queue for want of memory"),
    # tokens
    "prompt_tokens": Metric("counter", "Prompt tokens of the requests admitted"),
    "generation_tokens": Metric("counter", "Tokens generated"),
    "prefill_tokens": Metric("counter", "Tokens computed in prefill (recomputation included)"),
    "prefix_query_tokens": Metric("counter", "Prompt tokens looked up in the prefix cache"),
    "prefix_hit_tokens": Metric("counter", "Prompt tokens found in the prefix cache"),
    "steps": Metric("counter", "Engine steps that ran a batch"),
    # pages; state is live, retained, unprotected or free
    "pages": Metric("gauge", "Pages by state and codec", ("state", "level")),
    "page_bytes": Metric("gauge", "Bytes of pages by state and codec, scales included", ("state", "level")),
    "pool_bytes": Metric("gauge", "Bytes of the whole pool"),
    "pool_free_bytes": Metric("gauge", "Bytes of free slots"),
    "pool_capacity_tokens": Metric(
        "gauge", "Tokens that the pool holds if every page has this codec", ("level",)
    ),
    "pages_allocated": Metric("counter", "Pages handed to requests"),
    "pages_expired": Metric(
        "counter", "Retained pages that lost protection because idle longer than ttl_seconds"
    ),
    "pages_over_budget": Metric("counter", "Retained pages that lost protection because of size_factor"),
    "pages_released": Metric(
        "counter", "Cached pages dropped because memory was needed, by state", ("state",)
    ),
    "pages_stepped_down": Metric("counter", "Pages re-encoded, by the codec they got", ("level",)),
    "retained_taken": Metric(
        "counter", "Retained pages dropped: idle_engine, growth or starving", ("reason",)
    ),
    "pages_read": Metric("counter", "Pages that decode steps read, by codec", ("level",)),
    "pages_moved": Metric("counter", "Pages moved by compaction"),
    # knobs
    "knob": Metric("gauge", "Effective value of a knob", ("name",)),
    "knob_revision": Metric("gauge", "Revision of the knobs"),
    "knob_changes": Metric("counter", "Knob values changed", ("name",)),
    "kv_quality_loss": Metric(
        "gauge", "Mean KL (nats per token) of a codec against an exact cache", ("level",)
    ),
    # latencies
    "time_to_first_token_seconds": Metric("histogram", "Arrival to first token", (), LATENCY_BUCKETS),
    "inter_token_seconds": Metric("histogram", "Between two tokens of a request", (), LATENCY_BUCKETS),
    "e2e_request_seconds": Metric("histogram", "Arrival to last token", (), LATENCY_BUCKETS),
    "queue_seconds": Metric("histogram", "Arrival to first admission", (), LATENCY_BUCKETS),
    "step_seconds": Metric("histogram", "Duration of an engine step", (), LATENCY_BUCKETS),
    "page_reuse_gap_seconds": Metric(
        "histogram", "Idle time of a cached page when it was hit", (), AGE_BUCKETS
    ),
    "page_idle_before_release_seconds": Metric(
        "histogram", "Idle time of a page when released", (), AGE_BUCKETS
    ),
}

Series = tuple[str, tuple[str, ...]]  # metric name, label values in the metric's order


class Histogram(NamedTuple):
    """Counts per bucket, the last one beyond the last bound. Not cumulative."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    sum: float

    @property
    def total(self) -> float:
        """Observations in all buckets."""
        return sum(self.counts)

    def minus(self, other: "Histogram") -> "Histogram":
        counts = tuple(a - b for a, b in zip(self.counts, other.counts, strict=True))
        return Histogram(self.bounds, counts, self.sum - other.sum)

    def quantile(self, q: float) -> float:
        """Linear interpolation within the bucket, as PromQL's histogram_quantile; nan if empty."""
        total = self.total
        if total <= 0:
            return math.nan
        rank, seen, low = q * total, 0.0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count > 0 and seen + count >= rank:
                return low + (bound - low) * (rank - seen) / count
            seen, low = seen + count, bound
        return self.bounds[-1]

    @property
    def mean(self) -> float:
        return self.sum / self.total if self.total > 0 else math.nan


@dataclass(frozen=True, kw_only=True)
class StatsSnapshot:
    """All statistics at one moment. `time` is in seconds on the engine's clock (or the scraper's)."""

    time: float
    values: Mapping[Series, float]  # counters and gauges
    histograms: Mapping[str, Histogram]

    def value(self, name: str, *labels: str) -> float:
        """A counter or gauge; 0 for a counter never incremented, KeyError for an unknown name or absent gauge."""
        if METRICS[name].kind == "counter":
            return self.values.get((name, labels), 0.0)
        return self.values[(name, labels)]

    def total(self, name: str) -> float:
        """Sum over all label values."""
        return sum(value for (series, _), value in self.values.items() if series == name)


@dataclass(frozen=True, kw_only=True)
class StatsWindow:
    """What happened between two snapshots of the same engine process."""

    start: StatsSnapshot
    end: StatsSnapshot
    restarted: bool = False  # the reader saw a reset in between that the counters have caught up with since

    @property
    def seconds(self) -> float:
        return self.end.time - self.start.time

    def is_reset(self) -> bool:
        """A counter went down: the engine restarted in between, the window means nothing."""
        return self.restarted or any(
            value < self.start.values.get(series, 0.0)
            for series, value in self.end.values.items()
            if METRICS[series[0]].kind == "counter"
        )

    def delta(self, name: str, *labels: str) -> float:
        return self.end.value(name, *labels) - self.start.value(name, *labels)

    def total(self, name: str) -> float:
        return self.end.total(name) - self.start.total(name)

    def rate(self, name: str) -> float:
        """Per second, over all labels; nan for an empty window."""
        return self.total(name) / self.seconds if self.seconds > 0 else math.nan

    def histogram(self, name: str) -> Histogram:
        return self.end.histograms[name].minus(self.start.histograms[name])

    @property
    def hit_rate(self) -> float:
        """Share of looked-up prompt tokens found in the prefix cache; nan if none was looked up."""
        queries = self.total("prefix_query_tokens")
        return self.total("prefix_hit_tokens") / queries if queries > 0 else math.nan


class StatsRecorder:
    """Mutable collector behind the snapshots; one writer."""

    def __init__(self) -> None:
        # Present from the start, so that rates see the first increment and a scraper can tell "0" from "missing".
        self._counters: dict[str, float] = {
            name: 0 for name, metric in METRICS.items() if metric.kind == "counter" and not metric.labels
        }
        self._labelled: dict[Series, float] = {}
        self._buckets = {
            name: metric.buckets for name, metric in METRICS.items() if metric.kind == "histogram"
        }
        self._bucket_counts = {name: [0] * (len(bounds) + 1) for name, bounds in self._buckets.items()}
        self._sums = dict.fromkeys(self._buckets, 0.0)

    def add(self, name: str, amount: float = 1, label: str | None = None) -> None:
        if label is None:
            self._counters[name] += amount
            return
        series: Series = (name, (label,))
        self._labelled[series] = self._labelled.get(series, 0) + amount

    def observe(self, name: str, value: float, times: int = 1) -> None:
        self._bucket_counts[name][bisect_left(self._buckets[name], value)] += times
        self._sums[name] += value * times

    def snapshot(self, time: float, gauges: Mapping[Series, float]) -> StatsSnapshot:
        histograms = {
            name: Histogram(bounds, tuple(self._bucket_counts[name]), self._sums[name])
            for name, bounds in self._buckets.items()
        }
        counters: dict[Series, float] = {(name, ()): value for name, value in self._counters.items()}
        values = {**counters, **self._labelled, **gauges}
        return StatsSnapshot(time=time, values=values, histograms=histograms)
