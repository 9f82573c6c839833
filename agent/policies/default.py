"""What everybody has today: the knobs stay as the engine was started."""

from collections.abc import Mapping

from kvpilot.engine.config import KnobBounds
from kvpilot.env.observation import Observation
from kvpilot.env.policy import KnobValues, Proposal


class DefaultPolicy:
    """Never changes anything."""

    name = "default"

    def reset(self) -> None:
        pass

    def propose(
        self, observation: Observation, knobs: KnobValues, bounds: Mapping[str, KnobBounds]
    ) -> Proposal:
        return Proposal({}, "as the engine was started")
