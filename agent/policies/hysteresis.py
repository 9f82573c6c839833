"""One signal, two thresholds, two settings: the simplest rule that reacts, and with tuned values a strong one."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from kvpilot.agent.policies.changes import clip_knobs, only_changed
from kvpilot.engine.config import KNOB_NAMES, KnobBounds
from kvpilot.engine.errors import ConfigError
from kvpilot.env.observation import Observation
from kvpilot.env.policy import KnobValues, Proposal

SIGNALS = tuple(f.name for f in fields(Observation) if f.type == float | None)


@dataclass(frozen=True, kw_only=True)
class HysteresisConfig:
    """Under pressure from `signal` >= `high` on, calm again from `signal` <= `low` on; between them nothing moves."""

    signal: str = "waiting"  # a number of Observation, in its unit
    high: float = 16.0
    low: float = 8.0
    calm: Mapping[str, float]  # knobs; those left out stay as they are
    pressure: Mapping[str, float]

    def __post_init__(self) -> None:
        if self.signal not in SIGNALS:
            raise ConfigError(f"signal={self.signal!r} is invalid: expected one of {', '.join(SIGNALS)}")
        if not (math.isfinite(self.low) and math.isfinite(self.high)) or self.low > self.high:
            raise ConfigError(
                f"low={self.low!r} and high={self.high!r} are invalid: expected numbers, low <= high"
            )
        for name in ("calm", "pressure"):
            unknown = set(getattr(self, name)) - set(KNOB_NAMES)
            if unknown:
                raise ConfigError(f"{name} names {sorted(unknown)}: expected knobs {', '.join(KNOB_NAMES)}")

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        return {**values, "calm": dict(self.calm), "pressure": dict(self.pressure)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "HysteresisConfig":
        """Raises ConfigError for values out of bounds, TypeError for missing or unknown names."""
        return cls(**values)


class HysteresisPolicy:
    """Sets `calm` or `pressure`. A window that lacks the signal changes nothing."""

    name = "hysteresis"

    def __init__(self, config: HysteresisConfig) -> None:
        self.config = config
        self.reset()

    def reset(self) -> None:
        self.under_pressure = False

    def propose(
        self, observation: Observation, knobs: KnobValues, bounds: Mapping[str, KnobBounds]
    ) -> Proposal:
        config = self.config
        value = getattr(observation, config.signal)
        if value is None or not math.isfinite(value):
            return Proposal({}, f"{config.signal} was not measured")
        if value >= config.high:
            self.under_pressure = True
        elif value <= config.low:
            self.under_pressure = False
        wanted = config.pressure if self.under_pressure else config.calm
        regime = "pressure" if self.under_pressure else "calm"
        reason = (
            f"{regime}: {config.signal} {value:.3g} (enters at {config.high:g}, leaves at {config.low:g})"
        )
        return Proposal(only_changed(clip_knobs(wanted, bounds), knobs), reason)
