"""One knob, one step at a time, kept if it helped: the tuner that people write first."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvpilot.agent.policies.changes import clip_knobs, only_changed
from kvpilot.agent.policies.objective import window_objective
from kvpilot.agent.policies.space import from_unit, to_unit
from kvpilot.engine.config import KnobBounds
from kvpilot.env.observation import Observation
from kvpilot.env.policy import KnobValues, Proposal

Objective = Callable[[Observation], float | None]


@dataclass(frozen=True, kw_only=True)
class HillClimbConfig:
    step: float = 0.15  # of a knob's scale; an integer knob moves by one at least
    settle_decisions: int = 2  # after a change, before it is judged: the effect takes minutes
    judge_decisions: int = 2  # whose mean objective is compared
    margin: float = 0.01  # a step has to gain as much to be kept


class HillClimbPolicy:
    """Measures where it stands, tries a step, keeps it or goes back and tries the next direction.

    `objective` scores a window by live quantities. Windows without a score are not counted.
    """

    name = "hill-climb"

    def __init__(
        self,
        config: HillClimbConfig | None = None,
        objective: Objective = window_objective,
        start: Mapping[str, float] | None = None,
    ) -> None:
        """`start`: the knobs that it sets first; left out, it starts from those it finds."""
        self.config = config or HillClimbConfig()
        self._objective, self._start = objective, start
        self.reset()

    def reset(self) -> None:
        self._home: dict[str, float] | None = None  # the best setting known
        self._home_score: float | None = None
        self._direction = 0  # 2 * knob, plus 1 for downwards
        self._scores: list[float] = []
        self._age = 0  # decisions since the knobs changed

    def propose(
        self, observation: Observation, knobs: KnobValues, bounds: Mapping[str, KnobBounds]
    ) -> Proposal:
        if self._home is None:
            self._home = {name: knobs[name] for name in bounds} | clip_knobs(self._start or {}, bounds)
            changes = only_changed(self._home, knobs)
            if changes:
                return Proposal(changes, "to where it starts")
        self._age += 1
        score = self._objective(observation)
        if self._age > self.config.settle_decisions and score is not None:
            self._scores.append(score)
        if len(self._scores) < self.config.judge_decisions:
            return Proposal({}, f"measuring, {len(self._scores)} of {self.config.judge_decisions} windows")
        mean = sum(self._scores) / len(self._scores)
        self._scores, self._age = [], 0
        return self._move(mean, knobs, bounds)

    def _move(self, score: float, knobs: KnobValues, bounds: Mapping[str, KnobBounds]) -> Proposal:
        assert self._home is not None
        at_home = not only_changed(self._home, knobs)
        if at_home or self._home_score is None:
            self._home_score = score
        elif score > self._home_score + self.config.margin:
            self._home, self._home_score = {name: knobs[name] for name in bounds}, score
        else:
            self._direction += 1
            lost = f"{score:.3f} is not better than {self._home_score:.3f}: back"
            return Proposal(only_changed(self._home, knobs), lost)
        for _ in range(2 * len(bounds)):
            wanted, what = self._step(bounds)
            changes = only_changed(wanted, knobs)
            if changes:
                return Proposal(changes, f"{self._home_score:.3f} here; tries {what}")
            self._direction += 1
        return Proposal({}, "no knob can move")

    def _step(self, bounds: Mapping[str, KnobBounds]) -> tuple[dict[str, float], str]:
        assert self._home is not None
        names = list(bounds)
        knob, sign = self._direction // 2 % len(names), 1 - 2 * (self._direction % 2)
        name, limit = names[knob], bounds[names[knob]]
        point = to_unit(self._home, bounds)
        point[knob] += sign * self.config.step
        value = from_unit(point, bounds)[name]
        if limit.integer and value == self._home[name]:
            value = min(max(value + sign, limit.low), limit.high)
        return {**self._home, name: value}, f"{name}={value:.4g}"
