"""The look back before a policy is asked: what came of the last change, and what speaks against the next."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from kvpilot.agent.guard.changes import remember
from kvpilot.agent.guard.limits import GuardLimits
from kvpilot.agent.guard.memory import Memory, Move, Watch
from kvpilot.agent.guard.reasons import Reason, Refusal
from kvpilot.agent.guard.slo import has_regressed, pressure
from kvpilot.env.observation import Observation

HOUR = 3600.0
KEPT_PRESSURES = 8


class Review(NamedTuple):
    """`refusals` empty: the policy may be asked. `memory.target` set: first the way back."""

    memory: Memory
    refusals: list[Refusal]


class _Present(NamedTuple):
    """What the change on trial is judged by."""

    load: float | None  # SLO pressure; None: no request to measure it by
    seconds: float  # that the window is long
    knobs: Mapping[str, float]  # requested
    now: float
    unix_time: float
    limits: GuardLimits


def review(
    memory: Memory,
    observation: Observation,
    signals: Mapping[str, float | None],
    knobs: Mapping[str, float],
    *,
    now: float,
    unix_time: float,
    limits: GuardLimits,
    learn: bool = True,
) -> Review:
    """Judges the change on trial and watches the SLO and progress. `observation` is one that may be relied on,
    `knobs` are the requested values; `learn` is False where windows overlap with one learnt from."""
    memory = _expire(memory, now, unix_time)
    held = _latched(memory, now)
    if held:
        return Review(memory, held)
    memory, refusals = _watch_progress(memory, observation, knobs, limits)
    if refusals or memory.target is not None:
        return Review(memory, refusals or [Refusal(Reason.SETTLING, None, "on the way back")])
    load = pressure(signals, limits.slo)
    if memory.watch is None:
        return Review(_learn_good(memory, load, knobs) if learn else memory, [])
    if not learn and memory.watch.verified and (load is None or load <= 1):
        return Review(memory, [])
    present = _Present(load, observation.seconds, knobs, now, unix_time, limits)
    return _judge(memory, memory.watch, present)


def note_change(
    memory: Memory,
    changes: Mapping[str, float],
    knobs: Mapping[str, float],
    *,
    now: float,
    limits: GuardLimits,
    load: float | None = None,
    reuse_seconds: float | None = None,
    unix_time: float = 0.0,
) -> Memory:
    """After (an attempt at) a write of the policy's change. `knobs` are all values before it."""
    moves = [Move(now, name, knobs[name], value) for name, value in changes.items()]
    moved = replace(memory, moves=remember(memory, moves, now, limits), baseline=(), stalled=0)
    if memory.target is not None or limits.slo.is_empty:
        return replace(moved, last_good=memory.last_good or dict(knobs))
    patience = limits.reuse_seconds if reuse_seconds is None else reuse_seconds
    watch = Watch(
        at=now,
        before=dict(knobs),
        after={**knobs, **changes},
        unix_time=unix_time,
        baseline=memory.baseline,
        met=load is not None and load <= 1,
        flushes=flushes_cache(moves),
        patience_seconds=min(max(patience, limits.settle_seconds), limits.max_verify_seconds),
    )
    return replace(moved, watch=watch)


def resume(
    memory: Memory,
    watch: Watch,
    knobs: Mapping[str, float],
    *,
    now: float,
    unix_time: float,
    limits: GuardLimits,
) -> Memory:
    """Goes on with the trial that an earlier process began, if its knobs are still in force and it is not long ago."""
    age = unix_time - watch.unix_time
    if dict(knobs) != dict(watch.after) or not 0 <= age <= limits.max_verify_seconds:
        return memory
    return replace(memory, watch=replace(watch, at=now - age))


def flushes_cache(moves: Sequence[Move]) -> bool:
    """Whether cached pages are dropped: less is retained, or a finer level leaves room for fewer."""
    return any(not move.is_up and move.knob in ("ttl_seconds", "size_factor", "kv_level") for move in moves)


def note_conflict(memory: Memory, *, now: float, limits: GuardLimits) -> Memory:
    """Someone else's knobs are in force: nothing of ours is on trial any more, and nothing is known good."""
    return replace(
        memory,
        watch=None,
        target=None,
        last_good=None,
        baseline=(),
        frozen_until=now + limits.freeze_seconds,
    )


def note_failure(memory: Memory, *, now: float, limits: GuardLimits) -> Memory:
    """Policy or engine failed; a failure after the breaker's rest opens it again at once."""
    failures = memory.failures + 1
    opens = failures >= limits.max_failures
    return replace(
        memory, failures=failures, open_until=now + limits.breaker_seconds if opens else memory.open_until
    )


def note_success(memory: Memory) -> Memory:
    return replace(memory, failures=0, open_until=None) if memory.failures else memory


def is_open(memory: Memory, now: float) -> bool:
    """The circuit breaker: the policy is not asked."""
    return memory.open_until is not None and now < memory.open_until


def step_back(memory: Memory, target: Mapping[str, float] | None, knobs: Mapping[str, float]) -> Memory:
    """Sets out for earlier knobs, unless they are these."""
    differs = target is not None and any(knobs.get(name) != value for name, value in target.items())
    return replace(memory, target=dict(target) if target is not None and differs else None, watch=None)


def _expire(memory: Memory, now: float, unix_time: float) -> Memory:
    recent = tuple(when for when in memory.reverts if unix_time - when < HOUR)
    thawed = memory.frozen_until is not None and now >= memory.frozen_until
    return replace(memory, reverts=recent, frozen_until=None if thawed else memory.frozen_until)


def _latched(memory: Memory, now: float) -> list[Refusal]:
    if memory.safe_mode and memory.target is None:  # the way back is finished first
        return [Refusal(Reason.SAFE_MODE, None, memory.safe_mode)]
    if memory.frozen_until is not None:
        wait = memory.frozen_until - now
        return [Refusal(Reason.CONFLICT, None, f"frozen for another {wait:.0f} s")]
    return []


def _watch_progress(
    memory: Memory, observation: Observation, knobs: Mapping[str, float], limits: GuardLimits
) -> tuple[Memory, list[Refusal]]:
    """Requests wait and no token comes: whatever /health says, the engine makes no progress."""
    if not observation.waiting or observation.tokens_per_second != 0:
        return (replace(memory, stalled=0) if memory.stalled else memory), []
    memory = replace(memory, stalled=memory.stalled + 1)
    if memory.stalled < limits.stalled_windows:
        return memory, [Refusal(Reason.STALLED, None, f"{observation.waiting:g} waiting and no token")]
    back = memory.watch.before if memory.watch is not None else memory.last_good
    detail = f"{observation.waiting:g} waiting and no token in {memory.stalled} windows"
    return step_back(memory, back, knobs), [Refusal(Reason.STALLED, None, detail)]


def _learn_good(memory: Memory, load: float | None, knobs: Mapping[str, float]) -> Memory:
    if load is None:
        return memory
    good = dict(knobs) if load <= 1 else memory.last_good
    return replace(memory, baseline=(*memory.baseline, load)[-KEPT_PRESSURES:], last_good=good)


def _judge(memory: Memory, watch: Watch, present: _Present) -> Review:
    limits, load = present.limits, present.load
    age = present.now - watch.at
    if age < max(limits.settle_seconds, present.seconds):  # the window must lie behind the change
        detail = f"the change {age:.0f} s ago is judged after {limits.settle_seconds:g} s"
        return Review(memory, [Refusal(Reason.SETTLING, None, detail)])
    if load is None:
        return _unjudged(memory, watch, age, limits)
    if load > 1 and watch.met:
        return _revert(memory, watch, present, Refusal(Reason.SLO, None, f"{load:.2f} of the limit"))
    if watch.verified:
        return _on_probation(memory, load, present.knobs, is_over=age >= limits.blame_seconds)
    if watch.flushes and age < watch.patience_seconds:
        detail = f"pages were dropped: judged after {watch.patience_seconds:.0f} s, {age:.0f} have passed"
        return Review(memory, [Refusal(Reason.SETTLING, None, detail)])
    if has_regressed(load, watch.baseline, sigmas=limits.noise_sigmas, floor=limits.noise_floor):
        was = ", ".join(f"{one:.2f}" for one in watch.baseline)
        detail = f"{load:.2f} of the limit, before {was}"
        return _revert(memory, watch, present, Refusal(Reason.REGRESSED, None, detail))
    return Review(replace(memory, watch=replace(watch, verified=True), baseline=(load,)), [])


def _on_probation(memory: Memory, load: float, knobs: Mapping[str, float], *, is_over: bool) -> Review:
    if is_over:
        return Review(_learn_good(replace(memory, watch=None), load, knobs), [])
    return Review(replace(memory, baseline=(*memory.baseline, load)[-KEPT_PRESSURES:]), [])


def _unjudged(memory: Memory, watch: Watch, age: float, limits: GuardLimits) -> Review:
    if watch.verified and age < limits.blame_seconds:
        return Review(memory, [])
    if watch.verified or age >= limits.max_verify_seconds:
        return Review(replace(memory, watch=None), [])
    return Review(memory, [Refusal(Reason.SETTLING, None, "no request to judge the last change by")])


def _revert(memory: Memory, watch: Watch, present: _Present, why: Refusal) -> Review:
    """Back to the knobs before the change; after too many, nothing more until a human says so."""
    reverts = memory.reverts if watch.verified else (*memory.reverts, present.unix_time)
    safe_mode, allowed = memory.safe_mode, present.limits.max_reverts_per_hour
    if len(reverts) > allowed:
        safe_mode = f"{len(reverts)} reverts within an hour, allowed {allowed}"
    back = watch.before
    if watch.verified and memory.last_good is not None:
        back = memory.last_good
    memory = replace(memory, reverts=reverts, safe_mode=safe_mode)
    return Review(step_back(memory, back, present.knobs), [why])
