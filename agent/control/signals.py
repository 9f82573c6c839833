"""What the guard looks at besides the observation: tails of the window, by the names of the SLO's limits."""

from kvpilot.agent.guard import SloLimits
from kvpilot.engine.stats import StatsWindow
from kvpilot.env.observation import Observation, mean, quantile
from kvpilot.env.slo import Slo

REUSE_QUANTILE = 0.9


def signals_of(window: StatsWindow, observation: Observation) -> dict[str, float | None]:
    """None: not measured in this window. The first four are those that `SloLimits` has limits for."""
    return {
        "ttft_p99_seconds": time_to_first_token(observation),
        "inter_token_p99_seconds": observation.inter_token_p99_seconds,
        "queue_p99_seconds": quantile(window, "queue_seconds", 0.99),
        "violation_share": observation.slo_violation_share,
        "quality_loss": observation.quality_loss,
        "hit_rate": observation.hit_rate,
        "e2e_mean_seconds": mean(window, "e2e_request_seconds"),
        "pool_bytes": window.end.values.get(("pool_bytes", ())),
    }


def time_to_first_token(observation: Observation) -> float | None:
    """The 99th percentile of those that were answered, but not less than what the waiting have waited on the mean (or,
    where nobody was answered, the longest of them): who is still without an answer is in no histogram."""
    answered = observation.ttft_p99_seconds
    if not observation.waiting:
        return answered
    waited = observation.waiting_mean_seconds if answered is not None else observation.waiting_oldest_seconds
    return max((value for value in (answered, waited) if value is not None), default=None)


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
