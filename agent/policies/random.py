"""Knobs at random: what any policy that claims to know something has to beat."""

from collections.abc import Mapping

import numpy as np

from kvpilot.agent.policies.changes import only_changed
from kvpilot.agent.policies.space import from_unit
from kvpilot.engine.config import KnobBounds
from kvpilot.env.observation import Observation
from kvpilot.env.policy import KnobValues, Proposal


class RandomPolicy:
    """Draws all knobs anew at every decision, uniform on their scales; the same draws after every reset."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.reset()

    def reset(self) -> None:
        self._random = np.random.default_rng(self.seed)

    def propose(
        self, observation: Observation, knobs: KnobValues, bounds: Mapping[str, KnobBounds]
    ) -> Proposal:
        point = self._random.uniform(size=len(bounds)).tolist()
        return Proposal(only_changed(from_unit(point, bounds), knobs), "drawn at random")
