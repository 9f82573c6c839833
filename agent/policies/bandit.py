"""Gradient ascent on what one measurement per round tells, in the unit cube of the knobs.

The estimate d / delta * reward * u at a point displaced by delta * u, u uniform on the sphere (Flaxman et al.,
arXiv cs/0408007), is what OPPerTune's Bluefin (NSDI 2024) tunes numeric parameters by.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvpilot.agent.policies.changes import only_changed
from kvpilot.agent.policies.hill_climb import Objective
from kvpilot.agent.policies.objective import window_objective
from kvpilot.agent.policies.space import from_unit, to_unit
from kvpilot.engine.config import KnobBounds
from kvpilot.env.observation import Observation
from kvpilot.env.policy import KnobValues, Proposal


@dataclass(frozen=True, kw_only=True)
class BanditConfig:
    delta: float = 0.2  # radius of the displacement
    learning_rate: float = 0.02  # of the centre, per unit of estimated gradient
    settle_decisions: int = 1  # after a change, before it is judged
    judge_decisions: int = 1  # per round
    baseline_memory: float = 0.8  # of the running mean that is subtracted: less variance, no bias as E[u] = 0
    seed: int = 0


class BanditPolicy:
    """Starts from `start`, or else from the knobs it finds. A round is one displaced setting, held for a while."""

    name = "bandit"

    def __init__(
        self,
        config: BanditConfig | None = None,
        objective: Objective = window_objective,
        start: Mapping[str, float] | None = None,
    ) -> None:
        self.config = config or BanditConfig()
        self._objective, self._start = objective, start
        self.reset()

    def reset(self) -> None:
        self._random = np.random.default_rng(self.config.seed)
        self._center: np.ndarray | None = None
        self._displacement: np.ndarray | None = None
        self._baseline: float | None = None
        self._scores: list[float] = []
        self._age = 0

    def propose(
        self, observation: Observation, knobs: KnobValues, bounds: Mapping[str, KnobBounds]
    ) -> Proposal:
        if self._center is None:
            self._center = np.array(to_unit({**knobs, **(self._start or {})}, bounds))
        if self._displacement is not None and not self._is_judged(observation):
            return Proposal({}, "measuring")
        if self._displacement is not None:
            self._learn(sum(self._scores) / len(self._scores))
        self._scores, self._age = [], 0
        draw = self._random.normal(size=len(bounds))
        self._displacement = draw / np.linalg.norm(draw)
        point = (self._center + self.config.delta * self._displacement).tolist()
        return Proposal(only_changed(from_unit(point, bounds), knobs), "tries a displaced setting")

    def _is_judged(self, observation: Observation) -> bool:
        self._age += 1
        score = self._objective(observation)
        if self._age > self.config.settle_decisions and score is not None:
            self._scores.append(score)
        return len(self._scores) >= self.config.judge_decisions

    def _learn(self, score: float) -> None:
        assert self._center is not None
        assert self._displacement is not None
        config = self.config
        if self._baseline is None:
            self._baseline = score
        gradient = len(self._center) / config.delta * (score - self._baseline) * self._displacement
        moved = self._center + config.learning_rate * gradient
        self._center = np.clip(moved, 0.0, 1.0)
        self._baseline = config.baseline_memory * self._baseline + (1 - config.baseline_memory) * score
