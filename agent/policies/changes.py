"""What policies share: wishes within the bounds, in the knobs' own types, and only what differs."""

from collections.abc import Mapping

from kvpilot.engine.config import KnobBounds
from kvpilot.env.policy import KnobValues


def clip_knobs(wanted: Mapping[str, float], bounds: Mapping[str, KnobBounds]) -> dict[str, float]:
    """The nearest values that are allowed; knobs without bounds are left out."""
    return {name: clip_knob(value, bounds[name]) for name, value in wanted.items() if name in bounds}


def clip_knob(value: float, limit: KnobBounds) -> float:
    inside = min(max(value, limit.low), limit.high)
    return round(inside) if limit.integer else float(inside)


def only_changed(wanted: Mapping[str, float], knobs: KnobValues) -> dict[str, float]:
    return {name: value for name, value in wanted.items() if knobs.get(name) != value}
