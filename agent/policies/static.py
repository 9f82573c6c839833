"""Fixed knobs, set once: what offline tuning gives."""

from collections.abc import Mapping

from kvpilot.agent.policies.changes import clip_knobs, only_changed
from kvpilot.engine.config import KNOB_NAMES, KnobBounds
from kvpilot.engine.errors import ConfigError
from kvpilot.env.observation import Observation
from kvpilot.env.policy import KnobValues, Proposal


class StaticPolicy:
    """Sets `knobs` at the first decision, and again if somebody changes them."""

    def __init__(self, knobs: Mapping[str, float], name: str = "static") -> None:
        unknown = set(knobs) - set(KNOB_NAMES)
        if unknown:
            raise ConfigError(f"knobs={dict(knobs)!r} is invalid: expected some of {', '.join(KNOB_NAMES)}")
        self.name = name
        self.wanted = dict(knobs)

    def reset(self) -> None:
        pass

    def propose(
        self, observation: Observation, knobs: KnobValues, bounds: Mapping[str, KnobBounds]
    ) -> Proposal:
        changes = only_changed(clip_knobs(self.wanted, bounds), knobs)
        return Proposal(changes, "to the static setting" if changes else "at the static setting")
