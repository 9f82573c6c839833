"""What a window is worth: hits and saved latency, less broken promises, lost quality and churn."""

import math
from dataclasses import asdict, dataclass
from typing import NamedTuple, Protocol

from kvpilot.engine.errors import ConfigError, KVPilotError
from kvpilot.engine.stats import StatsWindow
from kvpilot.env.observation import Observation

# The relative loss of quality is the mean KL over this many nats per token. It is a price, not a measurement: the
# .0012 nats of int4 pages count as 4 % lost, the 7e-5 of int8 as .2 %. Published int4 recipes, with several times
# that KL, lose 1.5 % of MMLU, 2 % of GSM8K and up to 24 % of GPQA, relative to full precision.
KL_OF_TOTAL_LOSS = 0.03


class RewardError(KVPilotError):
    """A reward is not a number; the message names the part."""


class RewardParts(NamedTuple):
    """`total` is the sum of the others; gains >= 0 but for latency, costs <= 0."""

    total: float
    hits: float
    latency: float
    slo: float
    quality: float
    churn: float


class Reward(Protocol):
    """Called once per window, in order."""

    def reset(self) -> None:
        """Another episode begins."""
        ...

    def update(
        self, window: StatsWindow, observation: Observation, reference: float | None, changes: int
    ) -> RewardParts:
        """`observation` is that of `window`; `reference` the mean latency (seconds) of the default configuration in
        the same window of the same traffic, None where there is none; `changes` counts knobs changed as it began.
        Raises RewardError where a part is not a number."""
        ...

    def on_failure(self) -> float:
        """Worth of a window in which the engine failed."""
        ...


@dataclass(frozen=True, kw_only=True)
class RewardWeights:
    """The strict quality weight is the default: a relative loss of .05 on all reads costs .3, int4 on all reads .24."""

    hits: float = 0.7
    latency: float = 0.3
    slo: float = 0.3  # of the share of first tokens or gaps beyond the SLO, whichever is larger
    quality: float = 6.0  # of the relative loss, see KL_OF_TOTAL_LOSS
    churn: float = 0.002  # per knob changed
    failure: float = -1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not math.isfinite(value) or (value < 0 and name != "failure"):
                raise ConfigError(f"weight {name}={value!r} is invalid: expected a finite number >= 0")

    def to_json(self) -> dict[str, float]:
        return asdict(self)


class ObjectiveReward:
    """`.7 hit rate + .3 latency savings - SLO violations - quality loss - churn`, each with its weight."""

    def __init__(self, weights: RewardWeights | None = None) -> None:
        self.weights = weights or RewardWeights()
        self.reset()

    def reset(self) -> None:
        self._hit_rate = 0.0

    def update(
        self, window: StatsWindow, observation: Observation, reference: float | None, changes: int = 0
    ) -> RewardParts:
        weights = self.weights
        parts = {
            "hits": weights.hits * self._hits(observation),
            "latency": weights.latency * latency_savings(mean_latency(window), reference),
            "slo": -weights.slo * slo_share(observation),
            "quality": -weights.quality * relative_loss(observation.quality_loss),
            "churn": -weights.churn * changes,
        }
        for name, value in parts.items():
            if not math.isfinite(value):
                raise RewardError(
                    f"reward part {name}={value!r} at {observation.time:g} s is not a number: expected every codec "
                    "of the ladder to have a measured quality loss, and counters that do not go down"
                )
        return RewardParts(sum(parts.values()), **parts)

    def on_failure(self) -> float:
        return self.weights.failure

    def _hits(self, observation: Observation) -> float:
        """Without a look-up the rate stays as it was; but if nothing was admitted while requests wait, it is 0."""
        if observation.hit_rate is not None:
            self._hit_rate = observation.hit_rate
        elif observation.waiting:
            return 0.0
        return self._hit_rate


def mean_latency(window: StatsWindow) -> float | None:
    """Seconds from arrival to the last token, mean over the requests that ended in the window. Where none did, the
    mean time that those waiting have waited so far; None if nobody waits either."""
    ended = window.histogram("e2e_request_seconds")
    if ended.total:
        return ended.mean
    waiting = window.end.values.get(("requests_waiting", ()), 0.0)
    return window.end.values.get(("waiting_mean_seconds", ())) if waiting else None


def latency_savings(seconds: float | None, reference: float | None) -> float:
    """In [-1, 1]: the share of the slower one's latency that lies between the two; > 0 if faster than the reference."""
    if seconds is None or reference is None or max(seconds, reference) <= 0:
        return 0.0
    return (reference - seconds) / max(seconds, reference)


def slo_share(observation: Observation) -> float:
    """Share beyond the SLO; all, if nothing ended a token while requests wait."""
    if observation.slo_violation_share is not None:
        return observation.slo_violation_share
    return 1.0 if observation.waiting else 0.0


def relative_loss(kl: float | None) -> float:
    """Of a mean KL in nats per token, as a share of the quality; nan where a codec that was read is unmeasured."""
    return math.nan if kl is None else min(kl / KL_OF_TOTAL_LOSS, 1.0)
