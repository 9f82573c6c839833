"""What the guard looks at besides the observation: tails of the window, by the names of the SLO's limits."""

import math

from kvpilot.agent.guard import SloLimits
from kvpilot.engine.stats import StatsWindow
from kvpilot.env.observation import Observation
from kvpilot.env.slo import Slo

REUSE_QUANTILE = 0.9


def signals_of(window: StatsWindow, observation: Observation) -> dict[str, float | None]:
    """None: not measured in this window. The first four are those that `SloLimits` has limits for."""
    ttft = observation.ttft_p99_seconds
    if ttft is None and observation.waiting:
        ttft = observation.waiting_oldest_seconds  # nobody got a first token: at least so long
    return {
        "ttft_p99_seconds": ttft,
        "inter_token_p99_seconds": observation.inter_token_p99_seconds,
        "queue_p99_seconds": quantile(window, "queue_seconds", 0.99),
        "violation_share": observation.slo_violation_share,
        "quality_loss": observation.quality_loss,
        "hit_rate": observation.hit_rate,
        "e2e_mean_seconds": mean(window, "e2e_request_seconds"),
        "pool_bytes": window.end.values.get(("pool_bytes", ())),
    }


def slo_of(limits: SloLimits) -> Slo:
    """What the share of requests beyond the SLO is counted by."""
    given = {"ttft_seconds": limits.ttft_p99_seconds, "inter_token_seconds": limits.inter_token_p99_seconds}
    return Slo(**{name: limit for name, limit in given.items() if limit is not None})


def reuse_seconds(window: StatsWindow) -> float | None:
    """How long cached pages lay idle until they were hit, since the engine started; None: never hit."""
    histogram = window.end.histograms.get("page_reuse_gap_seconds")
    if histogram is None or histogram.total <= 0:
        return None
    return histogram.quantile(REUSE_QUANTILE)


def quantile(window: StatsWindow, name: str, q: float) -> float | None:
    if name not in window.end.histograms or name not in window.start.histograms:
        return None
    value = window.histogram(name).quantile(q)
    return value if math.isfinite(value) else None


def mean(window: StatsWindow, name: str) -> float | None:
    if name not in window.end.histograms or name not in window.start.histograms:
        return None
    value = window.histogram(name).mean
    return value if math.isfinite(value) else None
