"""The knobs as a point of the unit cube, each on the scale on which it matters."""

import math
from collections.abc import Mapping, Sequence

from kvpilot.agent.policies.changes import clip_knob
from kvpilot.engine.config import KnobBounds


def to_unit(knobs: Mapping[str, float], bounds: Mapping[str, KnobBounds]) -> list[float]:
    """One number in [0, 1] per knob, in the order of `bounds`."""
    return [_share(clip_knob(knobs[name], limit), limit) for name, limit in bounds.items()]


def from_unit(point: Sequence[float], bounds: Mapping[str, KnobBounds]) -> dict[str, float]:
    """The knobs at `point`; what lies outside of the cube is moved to its nearest face."""
    return {name: _value(share, limit) for share, (name, limit) in zip(point, bounds.items(), strict=True)}


def _share(value: float, limit: KnobBounds) -> float:
    span = limit.high - limit.low
    if span <= 0:
        return 0.0
    if limit.scale == "log":  # of 1 + distance, as the lower end may be 0
        return math.log1p(value - limit.low) / math.log1p(span)
    return (value - limit.low) / span


def _value(share: float, limit: KnobBounds) -> float:
    share, span = min(max(share, 0.0), 1.0), limit.high - limit.low
    distance = math.expm1(share * math.log1p(span)) if limit.scale == "log" else share * span
    return clip_knob(limit.low + distance, limit)
