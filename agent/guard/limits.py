"""What the guard enforces, as numbers. A limit is never guessed: a knob without one is not changed."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import log
from typing import Any

from kvpilot.agent.guard.slo import SloLimits
from kvpilot.engine.config import KNOB_NAMES
from kvpilot.engine.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Step:
    """Largest change at once: `add` for linear knobs; for log knobs a `factor`, and from below `origin`
    (where a factor leads nowhere, as from 0) straight to `origin`."""

    add: float = 0.0
    factor: float = 1.0
    origin: float = 0.0

    def limit(self, old: float, wanted: float) -> float:
        """The value nearest to `wanted` that one step from `old` may reach; always between the two."""
        if wanted > old:
            return max(old, min(wanted, max(old + self.add, old * self.factor, self.origin)))
        lowest = min(old - self.add, old / self.factor)
        return min(old, max(wanted, wanted if old <= self.origin else lowest))

    def count(self, old: float, new: float) -> float:
        """How many steps a change is; at most 1 for one that `limit` allows."""
        if old == new:
            return 0.0
        if max(old, new) <= self.origin:
            return 1.0
        low, high = sorted((max(old, self.origin), max(new, self.origin)))
        if self.factor > 1 and low > 0:
            return log(high / low) / log(self.factor)
        return (high - low) / self.add if self.add else 1.0


def default_steps() -> dict[str, Step]:
    return {
        "ttl_seconds": Step(factor=4.0, origin=60.0),
        "size_factor": Step(add=0.4),
        "max_batch": Step(factor=2.0, origin=1.0),
        "kv_level": Step(add=1),
    }


def intervals(seconds: float) -> dict[str, float]:
    """The shortest interval between two changes of a knob: the same for all."""
    return dict.fromkeys(KNOB_NAMES, seconds)


@dataclass(frozen=True, kw_only=True)
class GuardLimits:
    """All of the guard's numbers; the defaults fit an interval of 15 s and a decision every 60 s."""

    # the observation
    min_windows: int = 3  # observations since the loop or the engine started, before anything is changed
    max_age_seconds: float = 30.0  # of the window's end, when the decision is made
    max_window_seconds: float = 300.0  # longer windows say nothing about now
    # a change
    steps: Mapping[str, Step] = field(default_factory=default_steps)
    min_interval_seconds: Mapping[str, float] = field(default_factory=lambda: intervals(30.0))
    budget_steps_per_minute: float = 2.0  # per knob, in its steps
    max_flips: int = 2  # changes of direction of a knob within the next; then it only goes on as it went
    flip_seconds: float = 600.0  # after so long a flip is forgotten: the cool-down
    quality_loss_budget: float | None = None  # KL in nats per token; above it kv_level does not rise
    # the outcome
    slo: SloLimits = field(default_factory=SloLimits)
    settle_seconds: float = 60.0  # after a change, before its effect is judged
    reuse_seconds: float = 120.0  # the same after what drops cached pages, where the engine does not tell
    max_verify_seconds: float = 600.0  # without traffic a change cannot be judged; no longer wait than this
    blame_seconds: float = 300.0  # a violation this long after a verified change still leads back
    noise_sigmas: float = 3.0
    noise_floor: float = 0.25  # least rise that counts, in parts of the SLO's limit
    max_reverts_per_hour: int = 3  # one more latches safe mode
    stalled_windows: int = 2  # windows in a row with requests waiting and no token generated
    # the loop
    freeze_seconds: float = 300.0  # after someone else has changed the knobs
    max_failures: int = 3  # of policy or engine in a row, before the circuit breaker opens
    breaker_seconds: float = 300.0


def limits_as_dict(limits: GuardLimits) -> dict[str, Any]:
    """Plain values, for the audit log."""
    return asdict(limits)


def limits_from_dict(values: Mapping[str, Any]) -> GuardLimits:
    """What `limits_as_dict` gave, also after a round trip through JSON. Raises ConfigError."""
    try:
        steps = {name: Step(**step) for name, step in values["steps"].items()}
        return GuardLimits(**{**values, "steps": steps, "slo": SloLimits(**values["slo"])})
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"limits={values!r:.80} are not what this version wrote: {error!r}") from error
