"""What may become of a policy's wish. Pure functions; they shrink or hold a change, never enlarge or add one.

Every refusal carries a reason code, which the controller counts and writes to the audit log.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from kvpilot.engine.config import KnobBounds
from kvpilot.env.observation import REQUIRED, Observation


class Reason(StrEnum):
    # the observation
    WARMUP = "too-few-observations"
    RESET = "counter-reset"
    MISSING = "missing-signal"
    NOT_FINITE = "not-finite-signal"
    STALE = "stale-observation"
    FROZEN = "frozen-metrics"
    WINDOW = "window-length"
    # the wish
    UNKNOWN = "unknown-knob"
    NOT_HOT = "not-hot"
    NOT_A_NUMBER = "not-a-number"
    NOT_AN_INTEGER = "not-an-integer"
    BOUNDS = "bounds"
    STEP = "step"
    INTERVAL = "interval"
    PENDING = "pending"
    KNOBS_ODD = "knob-outside-bounds"
    # the loop
    ADVISORY = "advisory"
    OFF = "off"
    CONFLICT = "someone-else-changed-the-knobs"
    UNREACHABLE = "engine-unreachable"
    UNAUTHORIZED = "unauthorized"
    INVALID = "engine-refused"
    AUDIT = "audit-failed"


class Refusal(NamedTuple):
    """`knob` is None if the whole decision is held."""

    reason: Reason
    knob: str | None
    detail: str

    def __str__(self) -> str:
        return f"{self.reason}{f' {self.knob}' if self.knob else ''}: {self.detail}"


class Verdict(NamedTuple):
    """What may be written now, and everything that was shrunk or held."""

    changes: dict[str, float | int]
    refusals: list[Refusal]


@dataclass(frozen=True, kw_only=True)
class Step:
    """Largest change at once: `add` for linear knobs; for log knobs a `factor`, and from below `origin`
    (where a factor leads nowhere, as from 0) straight to `origin`."""

    add: float = 0.0
    factor: float = 1.0
    origin: float = 0.0

    def limit(self, old: float, wanted: float) -> float:
        """The value nearest to `wanted` that one step from `old` may reach; always between the two."""
        if wanted > old:
            return max(old, min(wanted, max(old + self.add, old * self.factor, self.origin)))
        lowest = min(old - self.add, old / self.factor)
        return min(old, max(wanted, wanted if old <= self.origin else lowest))


def default_steps() -> dict[str, Step]:
    return {
        "ttl_seconds": Step(factor=4.0, origin=60.0),
        "size_factor": Step(add=0.4),
        "max_batch": Step(factor=2.0, origin=1.0),
        "kv_level": Step(add=1),
    }


@dataclass(frozen=True, kw_only=True)
class GuardLimits:
    """A knob without a step or an interval is not changed at all: a limit is never guessed."""

    steps: Mapping[str, Step] = field(default_factory=default_steps)
    min_interval_seconds: Mapping[str, float] = field(default_factory=lambda: intervals(30.0))
    min_windows: int = 3  # observations since the loop or the engine started, before anything is changed
    max_age_seconds: float = 30.0  # of the window's end, when the decision is made
    max_window_seconds: float = 300.0  # longer windows say nothing about now


def intervals(seconds: float) -> dict[str, float]:
    """The shortest interval between two changes of a knob: the same for all."""
    return dict.fromkeys(("ttl_seconds", "size_factor", "max_batch", "kv_level"), seconds)


def check_observation(
    observation: Observation, *, windows_seen: int, now: float, limits: GuardLimits
) -> list[Refusal]:
    """Why no decision may rest on this observation (empty: it may). `now` is on the observation's clock."""
    refusals: list[Refusal] = []

    def refuse(reason: Reason, detail: str) -> None:
        refusals.append(Refusal(reason, None, detail))

    if observation.reset:
        refuse(Reason.RESET, "a counter went down: the engine restarted")
    if windows_seen < limits.min_windows:
        refuse(Reason.WARMUP, f"{windows_seen} of {limits.min_windows} observations")
    for name in REQUIRED:
        value = getattr(observation, name)
        if value is None:
            refuse(Reason.MISSING, name)
        elif not math.isfinite(value) or value < 0:
            refuse(Reason.NOT_FINITE, f"{name} is {value!r}")
    age = now - observation.time
    if not -1.0 <= age <= limits.max_age_seconds:
        refuse(Reason.STALE, f"{age:.1f} s old, allowed {limits.max_age_seconds:g} s")
    if not 0 < observation.seconds <= limits.max_window_seconds:
        refuse(Reason.WINDOW, f"{observation.seconds:.1f} s, allowed (0, {limits.max_window_seconds:g}] s")
    if observation.idle and (observation.running or observation.waiting):
        refuse(Reason.FROZEN, "requests are under way and no series moved")
    return refusals


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
) -> Verdict:
    """The part of `wanted` that may be written now. Each change lies between the knob's value in `knobs` and
    the wanted one, within bounds and step, and no knob moves before its interval has passed."""
    changes: dict[str, float | int] = {}
    refusals: list[Refusal] = []
    for name, value in wanted.items():
        if name in knobs and value == knobs[name]:
            continue
        refusal = _held(name, knobs, bounds, last_change, now, limits, pending, classes)
        if refusal is None:
            refusal = _unusable(name, value)
        if refusal is not None:
            refusals.append(refusal)
            continue
        assert isinstance(value, int | float)
        allowed, shrunk = _shrink(name, knobs[name], float(value), bounds[name], limits.steps[name])
        refusals += shrunk
        if allowed != knobs[name]:
            changes[name] = allowed
    return Verdict(changes, refusals)


def _held(
    name: str,
    knobs: Mapping[str, float],
    bounds: Mapping[str, KnobBounds],
    last_change: Mapping[str, float],
    now: float,
    limits: GuardLimits,
    pending: Collection[str],
    classes: Mapping[str, str] | None,
) -> Refusal | None:
    """Why this knob may not move at all now, whatever is wanted."""
    limited = name in limits.steps and name in limits.min_interval_seconds
    if name not in bounds or name not in knobs or not limited:
        return Refusal(Reason.UNKNOWN, name, f"the engine and the limits know {', '.join(sorted(bounds))}")
    if classes is not None and classes.get(name) != "hot":
        return Refusal(Reason.NOT_HOT, name, f"its class is {classes.get(name)!r}: needs a restart")
    if not _within(knobs[name], bounds[name]):
        return Refusal(Reason.KNOBS_ODD, name, f"the engine reports {knobs[name]!r}, bounds {bounds[name]}")
    if name in pending:
        return Refusal(Reason.PENDING, name, "the last change has not taken effect yet")
    shortest = limits.min_interval_seconds[name]
    elapsed = now - last_change.get(name, -math.inf)
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
    inside = min(max(wanted, limit.low), limit.high)
    if inside != wanted:
        refusals.append(Refusal(Reason.BOUNDS, name, f"wanted {wanted:g}, bounds {limit}"))
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
