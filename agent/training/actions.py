"""The policy's choices, and which of them is nearest to what somebody else would do."""

import math
from collections.abc import Mapping

from kvpilot.agent.training.config import TrainConfig
from kvpilot.agent.tune.result import TunedResult
from kvpilot.engine.config import KnobBounds
from kvpilot.env.tuning.actions import DEFAULT_GRIDS, Absolute, Actions, Delta, Portfolio, Setting
from kvpilot.env.tuning.vector import knob_position

Knobs = Mapping[str, float]
Bounds = Mapping[str, KnobBounds]
SAME = 1e-6  # of a knob's range


def action_set(config: TrainConfig, tuned: TunedResult) -> Actions:
    """The portfolio begins with the best static setting and holds what the tuned rule switches between."""
    match config.environment.actions:
        case "absolute":
            return Absolute(DEFAULT_GRIDS)
        case "delta":
            return Delta()
    settings = [Setting(name=one.name, knobs=one.knobs) for one in tuned.portfolio]
    for regime in ("calm", "pressure"):
        knobs = {**tuned.static_best.knobs, **getattr(tuned.hysteresis, regime)}
        if all(dict(setting.knobs) != knobs for setting in settings):
            settings.append(Setting(name=f"rule-{regime}", knobs=knobs))
    return Portfolio(tuple(settings))


def imitate(actions: Actions, wanted: Knobs, knobs: Knobs, bounds: Bounds) -> tuple[int, ...]:
    """The action after which the knobs are nearest to `wanted`, each on its own scale. A setting is named even where
    it would change nothing: what a state calls for does not depend on what is set already."""
    match actions:
        case Portfolio(settings=settings):
            after = [{**knobs, **setting.knobs} for setting in settings]
            return (1 + min(range(len(after)), key=lambda k: _distance(after[k], wanted, bounds)),)
        case Absolute(grids=grids):
            return tuple(
                1 + min(range(len(grid)), key=lambda k: _apart(grid[k], wanted[name], bounds[name]))
                for name, grid in grids.items()
            )
        case _:
            return tuple(_direction(wanted[name], knobs[name], bounds[name]) for name in knobs)


def _direction(wanted: float, value: float, limit: KnobBounds) -> int:
    """Of a Delta: 0 hold, 1 down, 2 up."""
    if _apart(wanted, value, limit) < SAME:
        return 0
    return 2 if wanted > value else 1


def _distance(after: Knobs, wanted: Knobs, bounds: Bounds) -> float:
    return math.hypot(*(_apart(after[name], wanted[name], bounds[name]) for name in wanted))


def _apart(one: float, other: float, limit: KnobBounds) -> float:
    clipped = (min(max(value, limit.low), limit.high) for value in (one, other))
    first, second = (knob_position(value, limit) for value in clipped)
    return abs(first - second)
