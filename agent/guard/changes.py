"""How much of a change may be written now: bounds, class, step, interval, budget, direction, quality."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from kvpilot.agent.guard.limits import GuardLimits, Step
from kvpilot.agent.guard.memory import Memory, Move
from kvpilot.agent.guard.reasons import Reason, Refusal, Verdict
from kvpilot.engine.config import KnobBounds

Allowed = Mapping[str, tuple[float | None, float | None]]  # an operator's bounds; None: the engine's
MINUTE = 60.0
ROUNDING = 1e-9


class _Present(NamedTuple):
    """What decides whether a knob may move at all."""

    knobs: Mapping[str, float]
    bounds: Mapping[str, KnobBounds]
    last_change: Mapping[str, float]
    now: float
    limits: GuardLimits
    pending: Collection[str]
    classes: Mapping[str, str] | None


def constrain(
    wanted: Mapping[str, object],
    knobs: Mapping[str, float],
    bounds: Mapping[str, KnobBounds],
    *,
    last_change: Mapping[str, float],
    now: float,
    limits: GuardLimits,
    pending: Collection[str] = (),
    classes: Mapping[str, str] | None = None,
    moves: Sequence[Move] = (),
    allowed: Allowed | None = None,
) -> Verdict:
    """The part of `wanted` that may be written now. Each change lies between the knob's value in `knobs` and
    the wanted one, within bounds and step, and no knob moves before its interval has passed.

    A knob outside the operator's bounds (`allowed`) may come nearer to them and no more.
    """
    present = _Present(knobs, bounds, last_change, now, limits, pending, classes)
    changes: dict[str, float | int] = {}
    refusals: list[Refusal] = []
    for name, value in wanted.items():
        if name in knobs and value == knobs[name]:
            continue
        refusal = _held(name, present) or _unusable(name, value)
        if refusal is not None:
            refusals.append(refusal)
            continue
        assert isinstance(value, int | float)
        low, high = (allowed or {}).get(name, (None, None))
        narrowed, step = narrow(bounds[name], low, high), limits.steps[name]
        near, shrunk = _shrink(name, knobs[name], float(value), narrowed, step)
        refusals += shrunk
        if near == knobs[name]:
            continue
        refusal = _too_much(Move(now, name, knobs[name], near), moves, limits)
        if refusal is not None:
            refusals.append(refusal)
        else:
            changes[name] = near
    return Verdict(changes, refusals)


def towards(
    target: Mapping[str, float],
    knobs: Mapping[str, float],
    bounds: Mapping[str, KnobBounds],
    limits: GuardLimits,
) -> dict[str, float | int]:
    """The next step back to knobs that had been in force: within bounds and one step per knob, but not held by
    interval, budget or flips, which would prolong harm."""
    changes: dict[str, float | int] = {}
    for name, value in target.items():
        if name in knobs and name in bounds and name in limits.steps and _within(knobs[name], bounds[name]):
            near, _ = _shrink(name, knobs[name], value, bounds[name], limits.steps[name])
            if near != knobs[name]:
                changes[name] = near
    return changes


def narrow(limit: KnobBounds, low: float | None, high: float | None) -> KnobBounds:
    """The intersection; may be empty (low above high)."""
    return KnobBounds(
        low=limit.low if low is None else max(limit.low, low),
        high=limit.high if high is None else min(limit.high, high),
        integer=limit.integer,
        scale=limit.scale,
    )


def check_quality(
    changes: Mapping[str, float], knobs: Mapping[str, float], loss: float | None, budget: float | None
) -> Refusal | None:
    """A lower precision only while the measured loss is within budget; an unknown loss is not zero."""
    level = changes.get("kv_level")
    if budget is None or level is None or level <= knobs["kv_level"]:
        return None
    if loss is not None and loss <= budget:
        return None
    measured = "not measured" if loss is None else f"{loss:.3g} nats per token"
    return Refusal(Reason.QUALITY, "kv_level", f"quality loss {measured}, budget {budget:.3g}")


def remember(memory: Memory, moves: Sequence[Move], now: float, limits: GuardLimits) -> tuple[Move, ...]:
    """The moves that some limit still looks at, with these added."""
    keep = max(limits.flip_seconds, MINUTE, *limits.min_interval_seconds.values())
    return (*(move for move in memory.moves if now - move.time <= keep), *moves)


def _too_much(move: Move, moves: Sequence[Move], limits: GuardLimits) -> Refusal | None:
    mine = [one for one in moves if one.knob == move.knob]
    step = limits.steps[move.knob]
    used = sum(step.count(one.old, one.new) for one in mine if move.time - one.time < MINUTE)
    budget = limits.budget_steps_per_minute
    if used + step.count(move.old, move.new) > budget + ROUNDING:
        return Refusal(Reason.BUDGET, move.knob, f"{used:.3g} steps in the last minute, allowed {budget:g}")
    recent = [one for one in mine if move.time - one.time < limits.flip_seconds]
    flips = Memory(moves=tuple(recent)).num_flips(move.knob)
    if recent and recent[-1].is_up != move.is_up and flips >= limits.max_flips:
        wait = limits.flip_seconds - (move.time - recent[-1].time)
        return Refusal(
            Reason.FLIPS, move.knob, f"{flips} changes of direction, cooling down for up to {wait:.0f} s"
        )
    return None


def _held(name: str, present: _Present) -> Refusal | None:
    """Why this knob may not move at all now, whatever is wanted."""
    knobs, bounds, limits, classes = present.knobs, present.bounds, present.limits, present.classes
    limited = name in limits.steps and name in limits.min_interval_seconds
    if name not in bounds or name not in knobs or not limited:
        return Refusal(Reason.UNKNOWN, name, f"the engine and the limits know {', '.join(sorted(bounds))}")
    if classes is not None and classes.get(name) != "hot":
        return Refusal(Reason.NOT_HOT, name, f"its class is {classes.get(name)!r}: needs a restart")
    if not _within(knobs[name], bounds[name]):
        return Refusal(Reason.KNOBS_ODD, name, f"the engine reports {knobs[name]!r}, bounds {bounds[name]}")
    if name in present.pending:
        return Refusal(Reason.PENDING, name, "the last change has not taken effect yet")
    shortest = limits.min_interval_seconds[name]
    elapsed = present.now - present.last_change.get(name, -math.inf)
    if not elapsed >= shortest:
        return Refusal(Reason.INTERVAL, name, f"changed {elapsed:.1f} s ago, allowed every {shortest:g} s")
    return None


def _unusable(name: str, value: object) -> Refusal | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return Refusal(Reason.NOT_A_NUMBER, name, f"{value!r:.80}")
    if isinstance(value, float) and not math.isfinite(value):
        return Refusal(Reason.NOT_A_NUMBER, name, repr(value))
    if abs(value) > 1e15:  # also keeps float() of a huge int from overflowing
        return Refusal(Reason.BOUNDS, name, "beyond any bound")
    return None


def _shrink(
    name: str, old: float, wanted: float, limit: KnobBounds, step: Step
) -> tuple[float | int, list[Refusal]]:
    refusals: list[Refusal] = []
    if limit.low > limit.high:
        return old, [Refusal(Reason.BOUNDS, name, f"no value is allowed: {limit}")]
    inside = min(max(wanted, limit.low), limit.high)
    if inside != wanted:
        refusals.append(Refusal(Reason.BOUNDS, name, f"wanted {wanted:g}, bounds {limit}"))
    if not min(old, wanted) <= inside <= max(old, wanted):  # it would turn the change round, or enlarge it
        return old, refusals
    near = step.limit(old, inside)
    if near != inside:
        refusals.append(Refusal(Reason.STEP, name, f"wanted {inside:g}, one step from {old:g} is {near:g}"))
    if not limit.integer:
        return near, refusals
    whole = math.floor(near) if near > old else math.ceil(near)  # towards the old value
    if whole != near:
        refusals.append(Refusal(Reason.NOT_AN_INTEGER, name, f"{near:g} becomes {whole}"))
    return whole, refusals


def _within(value: float, limit: KnobBounds) -> bool:
    return math.isfinite(value) and limit.low <= value <= limit.high
