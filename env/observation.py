"""What a policy sees of one window, live or simulated: numbers with units, None where nothing was measured."""

import math
from dataclasses import dataclass, field

from kvpilot.engine.stats import Histogram, StatsWindow
from kvpilot.env.slo import Slo


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One window. None is "not measured", never zero: no requests in a window means no hit rate."""

    time: float  # seconds, end of the window on the engine's clock
    seconds: float  # length of the window
    reset: bool = False  # a counter went down: the engine restarted
    idle: bool = False  # no counter moved at all
    running: float | None = None  # requests admitted, at the end
    waiting: float | None = None  # requests queued, at the end
    waiting_mean_seconds: float | None = None  # mean age of the queue, at the end
    waiting_oldest_seconds: float | None = None  # age of its oldest request
    live_share: float | None = None  # share of the pool's bytes held by running requests
    retained_share: float | None = None  # share held by protected idle pages
    free_share: float | None = None  # share in free slots
    preemptions: float | None = None  # in the window
    arrivals_per_second: float | None = None  # requests received or refused
    prompt_tokens_per_second: float | None = None  # of the requests admitted
    rejected: float | None = None  # requests refused in the window
    forced_admissions: float | None = None  # of starving requests, in the window
    released_per_second: float | None = None  # cached pages dropped because memory was needed
    retained_released_per_second: float | None = None  # those of them that were protected
    stepped_down_per_second: float | None = None  # pages re-encoded to a lower precision
    slo_violation_share: float | None = None  # of first tokens, or of gaps between tokens if that is larger
    quality_loss: float | None = None  # mean KL in nats per token over the pages that decode steps read
    hit_rate: float | None = None  # share of prompt tokens found in the prefix cache
    tokens_per_second: float | None = None  # generated
    ttft_p50_seconds: float | None = None
    ttft_p99_seconds: float | None = None
    inter_token_p50_seconds: float | None = None
    inter_token_p99_seconds: float | None = None
    level_shares: dict[str, float] = field(default_factory=dict)  # of the pool's bytes, by codec

    def as_dict(self) -> dict[str, object]:
        """For the audit log: rounded, and without non-finite numbers, which JSON lacks."""
        values = {name: value for name, value in self.__dict__.items() if name != "level_shares"}
        return {
            **{name: _plain(value) for name, value in values.items()},
            "level_shares": {codec: round(share, 4) for codec, share in self.level_shares.items()},
        }


# What a decision rests on. Absent or non-finite in any of them: hold.
REQUIRED = (
    "running",
    "waiting",
    "waiting_mean_seconds",
    "waiting_oldest_seconds",
    "live_share",
    "preemptions",
)


def observe(window: StatsWindow, slo: Slo | None = None) -> Observation:
    """The window's numbers; a gauge that the engine does not export becomes None."""
    slo = slo or Slo()
    pool_bytes = _gauge(window, "pool_bytes")
    free_bytes = _gauge(window, "pool_free_bytes")

    def share(num_bytes: float | None) -> float | None:
        return None if num_bytes is None or not pool_bytes else num_bytes / pool_bytes

    by_state, by_level = _page_bytes(window)
    levels = {codec: share(num_bytes) for codec, num_bytes in by_level.items()}
    return Observation(
        time=window.end.time,
        seconds=window.seconds,
        reset=window.is_reset(),
        idle=window.start.values == window.end.values,
        running=_gauge(window, "requests_running"),
        waiting=_gauge(window, "requests_waiting"),
        waiting_mean_seconds=_gauge(window, "waiting_mean_seconds"),
        waiting_oldest_seconds=_gauge(window, "waiting_oldest_seconds"),
        live_share=share(by_state.get("live", 0.0)),
        retained_share=share(by_state.get("retained", 0.0)),
        free_share=share(free_bytes),
        preemptions=_finite(window.total("preemptions")),
        arrivals_per_second=_finite(window.rate("requests_received") + window.rate("requests_rejected")),
        prompt_tokens_per_second=_finite(window.rate("prompt_tokens")),
        rejected=_finite(window.total("requests_rejected")),
        forced_admissions=_finite(window.total("admissions_forced")),
        released_per_second=_finite(window.rate("pages_released")),
        retained_released_per_second=_finite(window.rate("retained_taken")),
        stepped_down_per_second=_finite(window.rate("pages_stepped_down")),
        slo_violation_share=_violation_share(window, slo),
        quality_loss=_quality_loss(window),
        hit_rate=_finite(window.hit_rate),
        tokens_per_second=_finite(window.rate("generation_tokens")),
        ttft_p50_seconds=quantile(window, "time_to_first_token_seconds", 0.5),
        ttft_p99_seconds=quantile(window, "time_to_first_token_seconds", 0.99),
        inter_token_p50_seconds=quantile(window, "inter_token_seconds", 0.5),
        inter_token_p99_seconds=quantile(window, "inter_token_seconds", 0.99),
        level_shares={codec: value for codec, value in levels.items() if value is not None},
    )


def _gauge(window: StatsWindow, name: str) -> float | None:
    return window.end.values.get((name, ()))


def _page_bytes(window: StatsWindow) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes of occupied pages by state and by codec."""
    by_state: dict[str, float] = {}
    by_level: dict[str, float] = {}
    for (name, labels), num_bytes in window.end.values.items():
        if name == "page_bytes" and labels[0] != "free":
            by_state[labels[0]] = by_state.get(labels[0], 0.0) + num_bytes
            by_level[labels[1]] = by_level.get(labels[1], 0.0) + num_bytes
    return by_state, by_level


def _violation_share(window: StatsWindow, slo: Slo) -> float | None:
    """Over what ended its first token or its gap in this window; None if nothing did."""
    limits = {
        "time_to_first_token_seconds": slo.ttft_seconds,
        "inter_token_seconds": slo.inter_token_seconds,
    }
    shares = [
        share_above(window.histogram(name), limit)
        for name, limit in limits.items()
        if name in window.end.histograms and name in window.start.histograms
    ]
    return max((share for share in shares if share is not None), default=None)


def share_above(histogram: Histogram, limit: float) -> float | None:
    """Share of observations above `limit`, interpolated within its bucket as quantiles are; None if empty."""
    total = histogram.total
    if total <= 0:
        return None
    below, low = 0.0, 0.0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=False):
        if bound >= limit:
            below += count * (limit - low) / (bound - low)
            return min(max(1 - below / total, 0.0), 1.0)
        below, low = below + count, bound
    return histogram.counts[-1] / total


def _quality_loss(window: StatsWindow) -> float | None:
    """0 where nothing was read; None where a codec that was read has no measured loss."""
    return 0.0 if window.total("pages_read") <= 0 else _finite(quality_loss(window))


def quality_loss(window: StatsWindow) -> float:
    """Mean KL in nats per token over the pages that decode steps read, each with the loss of its level; nan if none
    was read or the loss of a level that was read is unknown."""
    reads = {
        labels: window.delta(name, *labels) for name, labels in window.end.values if name == "pages_read"
    }
    total = sum(reads.values())
    if not total:
        return math.nan
    losses = window.end.values
    return (
        sum(num * losses.get(("kv_quality_loss", level), math.nan) for level, num in reads.items() if num)
        / total
    )


def quantile(window: StatsWindow, name: str, q: float) -> float | None:
    """Of a histogram within the window; None: it is not told, or nothing was observed."""
    return _finite(window.histogram(name).quantile(q)) if _has(window, name) else None


def mean(window: StatsWindow, name: str) -> float | None:
    """The same of its mean."""
    return _finite(window.histogram(name).mean) if _has(window, name) else None


def _has(window: StatsWindow, name: str) -> bool:
    return name in window.end.histograms and name in window.start.histograms


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _plain(value: object) -> object:
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else str(value)
    return value
