"""What a canary must not make worse, as data, and the comparison. Pure functions over statistics windows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvpilot.engine.errors import ConfigError
from kvpilot.engine.stats import METRICS, Histogram, StatsWindow

QUANTILES = {"p90": 0.90, "p95": 0.95, "p99": 0.99}
PER_REQUEST = "perRequest"


class Outcome(StrEnum):
    PASSED = "Passed"
    FAILED = "Failed"
    MISSING = "Missing"  # not enough was measured to say so: never a pass


@dataclass(frozen=True, kw_only=True)
class Gate:
    """The canary passes if its statistic <= baseline's * max_ratio_permille / 1000 + slack_milli / 1000."""

    metric: str  # without prefix, as in kvpilot.engine.stats.METRICS
    statistic: str  # p90, p95 or p99 of a histogram; perRequest: a counter per request received
    max_ratio_permille: int = 1100
    slack_milli: int = 0  # thousandths of the metric's unit (of a request, for perRequest)
    min_samples: int = 200  # observations (requests, for perRequest) on each of the two sides

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise ConfigError(f"gates.{name}={getattr(self, name)!r} is invalid: expected {expected}")

        check(self.metric in METRICS, "metric", "the name of a metric of the engine")
        statistics = {"histogram": tuple(QUANTILES), "counter": (PER_REQUEST,)}
        allowed = statistics.get(METRICS[self.metric].kind, ())
        check(bool(allowed), "metric", "a histogram or a counter")
        check(self.statistic in allowed, "statistic", f"{' or '.join(allowed)} for {self.metric}")
        check(self.max_ratio_permille >= 1, "max_ratio_permille", ">= 1")
        check(self.slack_milli >= 0, "slack_milli", ">= 0")
        check(self.min_samples >= 1, "min_samples", ">= 1")


DEFAULT_GATES = (
    Gate(metric="time_to_first_token_seconds", statistic="p99", slack_milli=20),
    Gate(metric="inter_token_seconds", statistic="p99", slack_milli=5, min_samples=1000),
    Gate(metric="requests_rejected", statistic=PER_REQUEST, max_ratio_permille=1000, slack_milli=1),
)


@dataclass(frozen=True, kw_only=True)
class GateResult:
    """Values are nan where nothing was measured."""

    gate: Gate
    outcome: Outcome
    canary: float = math.nan
    baseline: float = math.nan
    canary_samples: int = 0
    baseline_samples: int = 0

    def __str__(self) -> str:
        name = f"{self.gate.metric} {self.gate.statistic}"
        values = f"{self.canary:.4g} against {self.baseline:.4g}"
        return f"{name}: {values} ({self.canary_samples} and {self.baseline_samples} samples) {self.outcome}"


def evaluate(
    gates: Sequence[Gate], canary: Sequence[StatsWindow | None], baseline: Sequence[StatsWindow | None]
) -> tuple[GateResult, ...]:
    """One result per gate. A window per pod; None is a pod that could not be measured.

    Both sides are pooled, so that a tail is the tail of all requests of a side.
    """
    if not canary or not baseline or None in (*canary, *baseline):
        return tuple(GateResult(gate=gate, outcome=Outcome.MISSING) for gate in gates)
    sides = [[window for window in side if window is not None] for side in (canary, baseline)]
    return tuple(_evaluate(gate, *sides) for gate in gates)


def overall(results: Sequence[GateResult]) -> Outcome:
    """A failed gate decides; a missing one keeps the rest from passing, and no gate at all passes nothing."""
    outcomes = {result.outcome for result in results}
    if Outcome.FAILED in outcomes:
        return Outcome.FAILED
    return Outcome.PASSED if outcomes == {Outcome.PASSED} else Outcome.MISSING


def _evaluate(gate: Gate, canary: Sequence[StatsWindow], baseline: Sequence[StatsWindow]) -> GateResult:
    canary_value, canary_samples = _statistic(gate, canary)
    baseline_value, baseline_samples = _statistic(gate, baseline)
    enough = min(canary_samples, baseline_samples) >= gate.min_samples
    if not enough or not math.isfinite(baseline_value) or math.isnan(canary_value):
        outcome = Outcome.MISSING
    else:
        limit = baseline_value * gate.max_ratio_permille / 1000 + gate.slack_milli / 1000
        outcome = Outcome.PASSED if canary_value <= limit else Outcome.FAILED
    return GateResult(
        gate=gate,
        outcome=outcome,
        canary=canary_value,
        baseline=baseline_value,
        canary_samples=canary_samples,
        baseline_samples=baseline_samples,
    )


def _statistic(gate: Gate, windows: Sequence[StatsWindow]) -> tuple[float, int]:
    """The value over all windows together, and how many observations are behind it."""
    if gate.statistic == PER_REQUEST:
        requests = sum(window.total("requests_received") for window in windows)
        total = sum(window.total(gate.metric) for window in windows)
        return (total / requests if requests > 0 else math.nan), int(requests)
    pooled = _pool([window.histogram(gate.metric) for window in windows])
    return _quantile(pooled, QUANTILES[gate.statistic]), int(pooled.total)


def _pool(histograms: Sequence[Histogram]) -> Histogram:
    counts = tuple(map(sum, zip(*(each.counts for each in histograms), strict=True)))
    return Histogram(histograms[0].bounds, counts, sum(each.sum for each in histograms))


def _quantile(histogram: Histogram, q: float) -> float:
    """Beyond the last bound nothing is known but that it is too long: infinite."""
    total = histogram.total
    if total > 0 and total - histogram.counts[-1] < q * total:
        return math.inf
    return histogram.quantile(q)
