"""Episodes driven by the rule or by the learner, with what every action would have been worth on the way.

Runs in worker processes: look-aheads fork, so nothing here may import torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpilot.agent.policies.exported import load_exported
from kvpilot.agent.policies.hysteresis import HysteresisConfig, HysteresisPolicy
from kvpilot.agent.training.actions import imitate
from kvpilot.agent.training.demonstrations import Demonstrations
from kvpilot.env.policy import Policy
from kvpilot.env.tuning.actions import Actions
from kvpilot.env.tuning.episode import Episode
from kvpilot.env.tuning.lookahead import lookahead
from kvpilot.env.tuning.reward import ObjectiveReward, RewardWeights
from kvpilot.env.tuning.rollout import start_run
from kvpilot.env.tuning.run import EpisodeRun
from kvpilot.env.tuning.vector import vectorize

LONGEST_EXCURSION = 5  # decisions


@dataclass(frozen=True, kw_only=True)
class LabelTask:
    """One episode to label; the result goes to `path`."""

    episode: Episode
    path: Path
    round: int
    seed: int
    actions: Actions
    rule: HysteresisConfig
    learner: Path | None  # exported policy that drives; None: the rule does
    decide_every: int
    weights: RewardWeights
    label_every: int | None  # decisions; None: no lookaheads
    horizon_seconds: float
    explore: float


def label(task: LabelTask) -> int:
    """Writes the demonstrations of one episode; how many decisions have values."""
    run = start_run(task.episode, reward=ObjectiveReward(task.weights))
    driver = _Driver(task)
    rows = _Rows(task)
    observation = run.first
    first = int(driver.rng.integers(task.label_every)) if task.label_every else 0
    while not run.is_done:
        knobs, bounds = dict(run.session.knobs), run.session.bounds
        features = vectorize(observation, knobs, bounds)
        rule, action = driver.decide(observation, knobs, bounds)
        due = task.label_every is not None and (len(rows.rewards) + first) % task.label_every == 0
        values = _action_values(run, task) if due else None
        step = run.step(task.actions.changes(action, knobs, bounds), task.decide_every)
        observation = step.observation
        rows.add(features, rule, values, step.reward)
    made = rows.demonstrations()
    task.path.parent.mkdir(parents=True, exist_ok=True)
    made.save(task.path)
    return made.num_labelled


def _action_values(run: EpisodeRun, task: LabelTask) -> list[float]:
    """Mean reward over the horizon for every action, held; what would be the same is simulated once."""
    knobs, bounds = run.session.knobs, run.session.bounds
    changes = [task.actions.changes(action, knobs, bounds) for action in range(task.actions.size)]
    different = [change for k, change in enumerate(changes) if change not in changes[:k]]
    values = lookahead(run, different, task.horizon_seconds, processes=1)
    return [values[different.index(change)] for change in changes]


class _Driver:
    """Chooses actions: the learner's or the rule's, with excursions to random ones that are held for a while."""

    def __init__(self, task: LabelTask) -> None:
        self.task = task
        self.rng = np.random.default_rng([task.seed, task.round])
        self.rule = HysteresisPolicy(task.rule)
        self.learner = load_exported(task.learner) if task.learner else None
        self._left = 0  # decisions of the excursion

    def decide(self, observation: Any, knobs: Any, bounds: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the rule would do, as an action, and what is done."""
        rule = self._wish(self.rule, observation, knobs, bounds)
        chosen = self.learner.choose(observation, knobs, bounds) if self.learner else rule
        if self._left:
            self._left -= 1
            return rule, tuple(0 for _ in rule)
        if self.rng.uniform() < self.task.explore / (0.5 * (1 + LONGEST_EXCURSION)):
            self._left = int(self.rng.integers(LONGEST_EXCURSION))
            return rule, tuple(int(self.rng.integers(size)) for size in self.task.actions.sizes)
        return rule, chosen

    def _wish(self, policy: Policy, observation: Any, knobs: Any, bounds: Any) -> tuple[int, ...]:
        wanted = {**knobs, **policy.propose(observation, knobs, bounds).knobs}
        return imitate(self.task.actions, wanted, knobs, bounds)


@dataclass
class _Rows:
    task: LabelTask
    features: list[NDArray[np.float32]] = field(default_factory=list)
    rule: list[Sequence[int]] = field(default_factory=list)
    values: list[list[float]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def add(
        self, features: NDArray[np.float32], rule: Sequence[int], values: list[float] | None, reward: float
    ) -> None:
        self.features.append(features)
        self.rule.append(rule)
        self.values.append(values or [np.nan] * sum(self.task.actions.sizes))
        self.rewards.append(reward)

    def demonstrations(self) -> Demonstrations:
        num = len(self.rewards)
        return Demonstrations(
            features=np.stack(self.features),
            starts=np.arange(num) == 0,
            values=np.array(self.values, np.float32),
            rule=np.array(self.rule, np.int64),
            rewards=np.array(self.rewards, np.float32),
            round=np.full(num, self.task.round, np.int64),
        )
