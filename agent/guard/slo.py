"""The service level objective as the guard sees it: outside the reward, judged on tails."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from kvpilot.engine.errors import ConfigError

MAX_PRESSURE = 1e6  # JSON knows no infinity
MIN_SAMPLES = 3  # windows, before their spread says anything about noise


@dataclass(frozen=True, kw_only=True)
class SloLimits:
    """None: no limit of this kind. A window that exceeds any of them violates the SLO."""

    ttft_p99_seconds: float | None = None  # arrival to first token
    inter_token_p99_seconds: float | None = None
    queue_p99_seconds: float | None = None  # arrival to admission
    violation_share: float | None = None  # of requests beyond the limits of `env.slo.Slo`

    def __post_init__(self) -> None:
        for name, limit in vars(self).items():
            least = 0.0 if name == "violation_share" else 1e-6
            if limit is not None and not least <= limit < MAX_PRESSURE:
                raise ConfigError(f"slo.{name}={limit!r} is invalid: expected a number >= {least:g}, or none")

    @property
    def is_empty(self) -> bool:
        return all(limit is None for limit in vars(self).values())


def pressure(signals: Mapping[str, float | None], slo: SloLimits) -> float | None:
    """The worst of value / limit: above 1 the SLO is violated. None if nothing that has a limit was measured."""
    ratios = [
        _ratio(value, limit)
        for name, limit in vars(slo).items()
        if limit is not None and (value := signals.get(name)) is not None
    ]
    return max(ratios, default=None)


def _ratio(value: float, limit: float) -> float:
    if limit == 0:
        return MAX_PRESSURE if value > 0 else 0.0
    return min(value / limit, MAX_PRESSURE)


def has_regressed(now: float, before: Sequence[float], *, sigmas: float, floor: float) -> bool:
    """Whether a pressure lies above those before by more than their noise; `floor` is the least rise that counts."""
    if not before:
        return False
    spread = stdev(before) if len(before) >= MIN_SAMPLES else 0.0
    return now > fmean(before) + max(sigmas * spread, floor)
