"""The loop: observe -> propose -> constrain -> apply -> verify. Runs without torch, beside the engine.

It leaves the knobs where they are whenever it stops, however it stops.
"""

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

from kvpilot.agent import guard
from kvpilot.agent.audit import AuditError, AuditLog
from kvpilot.agent.client import EngineUnavailableError, KnobState, PatchResult, UnauthorizedError
from kvpilot.agent.guard import GuardLimits, Reason, Refusal, Verdict
from kvpilot.engine.errors import KnobInvalidError, KnobStaleError
from kvpilot.engine.stats import StatsSnapshot, StatsWindow
from kvpilot.env.observation import Observation, observe
from kvpilot.env.policy import Policy

log = logging.getLogger("kvpilot.agent")


class Mode(StrEnum):
    OFF = "off"  # observe only
    ADVISORY = "advisory"  # decisions are logged and audited, nothing is written
    AUTO = "auto"  # decisions are written


class Outcome(StrEnum):
    OBSERVED = "observed"  # between two decisions
    HELD = "held"  # nothing may be written now
    ADVISED = "advised"  # would have been written in mode auto
    KEPT = "kept"  # the policy wants what is
    APPLIED = "applied"  # read back as effective
    PENDING = "pending"  # accepted, not effective yet
    EFFECTIVE = "effective"  # a pending change has taken effect
    FAILED = "failed"  # the engine refused it or did not answer


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One tick, for the audit log, the screen and the report."""

    time: float  # Unix time
    outcome: Outcome
    observation: Observation | None = None
    reason: str = ""  # the policy's
    wanted: Mapping[str, object] = field(default_factory=dict)
    changes: Mapping[str, float | int] = field(default_factory=dict)  # what the guard left of it
    refusals: tuple[Refusal, ...] = ()
    knobs: Mapping[str, float | int] = field(default_factory=dict)  # effective, at the end of the tick
    revision: int | None = None

    def as_dict(self) -> dict[str, object]:
        return {
            "time": round(self.time, 3),
            "outcome": self.outcome.value,
            "reason": self.reason,
            "wanted": {name: repr(value) for name, value in self.wanted.items()},
            "changes": dict(self.changes),
            "constraints": [
                {"reason": refusal.reason.value, "knob": refusal.knob, "detail": refusal.detail}
                for refusal in self.refusals
            ],
            "knobs": dict(self.knobs),
            "revision": self.revision,
            "window": self.observation.as_dict() if self.observation else None,
        }

    def __str__(self) -> str:
        moved = ", ".join(f"{name} -> {value:g}" for name, value in self.changes.items())
        held = "; ".join(str(refusal) for refusal in self.refusals)
        return " | ".join(part for part in (self.outcome, moved, self.reason, held) if part)


class Engine(Protocol):
    """What the loop needs of the engine; EngineClient is the one over HTTP."""

    def scrape(self) -> StatsSnapshot: ...

    def knobs(self) -> KnobState: ...

    def patch(self, knobs: Mapping[str, object], expected_revision: int | None = None) -> PatchResult: ...


class Controller:
    """One writer of one engine's knobs. `tick` is one round and never raises for what the world does."""

    def __init__(
        self,
        *,
        engine: Engine,
        policy: Policy,
        audit: AuditLog,
        mode: Mode = Mode.ADVISORY,
        limits: GuardLimits | None = None,
        decide_every: int = 1,  # observations per decision
        on_decision: Callable[[Decision], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine, self.policy, self.audit, self.mode = engine, policy, audit, mode
        self.limits, self.clock, self.on_decision = limits or GuardLimits(), clock, on_decision
        self.refused: Counter[Reason] = Counter()
        self.failures = 0  # ticks in a row without an answer of the engine
        self._snapshots: deque[StatsSnapshot] = deque(maxlen=decide_every + 1)
        self._windows_seen = 0
        self._offset = math.inf  # this clock minus the engine's, as small as ever seen
        self._ticks_to_decision = decide_every
        self._decide_every = decide_every
        self._last_change: dict[str, float] = {}
        self._revision: int | None = None  # the last one that this loop has seen or made
        self._in_doubt: dict[str, float | int] = {}  # written, but the answer was lost
        self._pending: dict[str, float | int] = {}  # accepted, not yet read back as effective

    def run(self, stop: threading.Event, interval_seconds: float) -> None:
        """Ticks until `stop` is set; backs off while the engine does not answer."""
        while not stop.is_set():
            try:
                self.tick()
            except Exception:
                log.exception("held: this tick failed")
            stop.wait(interval_seconds * min(2 ** max(self.failures - 1, 0), 8))

    def tick(self) -> Decision:
        """Observe, propose, constrain, apply, verify."""
        try:
            observation, refusals = self._observe()
            state = self.engine.knobs()
        except (EngineUnavailableError, UnauthorizedError) as error:
            return self._lost(error)
        self.failures = 0
        self._settle(state)
        draft = Decision(
            time=time.time(),
            outcome=Outcome.OBSERVED,
            observation=observation,
            knobs=dict(state.effective),
            revision=state.revision,
        )
        refusals += self._check_writer(state)
        self._ticks_to_decision -= 1
        if self.mode is Mode.OFF or (self._ticks_to_decision > 0 and not refusals):
            return self._tell(draft)
        self._ticks_to_decision = self._decide_every
        if refusals or observation is None:
            return self._record(replace(draft, outcome=Outcome.HELD, refusals=tuple(refusals)))
        proposal = self.policy.propose(observation, state.requested, state.bounds)
        verdict = self._constrain(proposal.knobs, state)
        draft = replace(
            draft,
            reason=proposal.reason,
            wanted=dict(proposal.knobs),
            changes=verdict.changes,
            refusals=tuple(verdict.refusals),
        )
        if not verdict.changes:
            return self._record(replace(draft, outcome=Outcome.HELD if verdict.refusals else Outcome.KEPT))
        if self.mode is Mode.ADVISORY:
            return self._record(_refused(draft, Outcome.ADVISED, Reason.ADVISORY, "nothing is written"))
        return self._apply(draft)

    def _observe(self) -> tuple[Observation | None, list[Refusal]]:
        snapshot = self.engine.scrape()
        previous = self._snapshots[-1] if self._snapshots else None
        reset = previous is not None and StatsWindow(start=previous, end=snapshot).is_reset()
        if reset:
            self._snapshots.clear()
            self._windows_seen, self._offset = 0, math.inf
        self._snapshots.append(snapshot)
        now = self.clock()
        self._offset = min(self._offset, now - snapshot.time)
        if reset:
            return None, [Refusal(Reason.RESET, None, "a counter went down: the engine restarted")]
        if previous is None:
            return None, [Refusal(Reason.WARMUP, None, "the first observation")]
        self._windows_seen += 1
        observation = observe(StatsWindow(start=self._snapshots[0], end=snapshot))
        engine_now = now - self._offset
        return observation, guard.check_observation(
            observation, windows_seen=self._windows_seen, now=engine_now, limits=self.limits
        )

    def _check_writer(self, state: KnobState) -> list[Refusal]:
        """One writer: a revision that this loop did not make freezes it for one decision."""
        known, self._revision = self._revision, state.revision
        doubt, self._in_doubt = self._in_doubt, {}
        if known is None or known == state.revision:
            return []
        if doubt and all(state.requested.get(name) == value for name, value in doubt.items()):
            log.info("the change whose answer was lost has been applied: revision %s", state.revision)
            return []
        return [Refusal(Reason.CONFLICT, None, f"revision {known} became {state.revision}")]

    def _constrain(self, wanted: Mapping[str, object], state: KnobState) -> Verdict:
        return guard.constrain(
            wanted,
            state.requested,
            state.bounds,
            last_change=self._last_change,
            now=self.clock(),
            limits=self.limits,
            pending=state.pending,
            classes=state.classes,
        )

    def _apply(self, draft: Decision) -> Decision:
        """Writes the intent to the audit log, then the knobs, then reads them back."""
        try:
            self._audit(replace(draft, outcome=Outcome.PENDING), kind="intent")
        except AuditError as error:
            return self._tell(_refused(draft, Outcome.HELD, Reason.AUDIT, str(error)))
        self._last_change.update(dict.fromkeys(draft.changes, self.clock()))
        try:
            result = self.engine.patch(draft.changes, expected_revision=draft.revision)
            self._revision = result.revision
            state = self.engine.knobs()
        except KnobStaleError as error:
            return self._record(_refused(draft, Outcome.HELD, Reason.CONFLICT, str(error)))
        except KnobInvalidError as error:
            return self._record(_refused(draft, Outcome.FAILED, Reason.INVALID, str(error)))
        except (EngineUnavailableError, UnauthorizedError) as error:
            self._in_doubt = dict(draft.changes)
            return self._record(_refused(draft, Outcome.FAILED, _reason(error), str(error)))
        effective = all(state.effective.get(name) == value for name, value in draft.changes.items())
        outcome = Outcome.APPLIED if effective else Outcome.PENDING
        self._pending = {} if effective else dict(draft.changes)
        done = replace(draft, outcome=outcome, knobs=dict(state.effective), revision=result.revision)
        return self._record(done)

    def _settle(self, state: KnobState) -> None:
        """Says so when a pending change has become effective."""
        arrived = {name: value for name, value in self._pending.items() if state.effective.get(name) == value}
        if arrived and not set(arrived) & set(state.pending):
            self._pending = {}
            knobs = dict(state.effective)
            done = Decision(time=time.time(), outcome=Outcome.EFFECTIVE, changes=arrived, knobs=knobs)
            self._record(replace(done, revision=state.revision))

    def _lost(self, error: EngineUnavailableError | UnauthorizedError) -> Decision:
        self.failures += 1
        held = Decision(time=time.time(), outcome=Outcome.HELD)
        return self._record(_refused(held, Outcome.HELD, _reason(error), str(error)))

    def _record(self, decision: Decision) -> Decision:
        """A decision that wrote nothing, or whose intent is on record, survives a failing audit log."""
        try:
            self._audit(decision, kind="decision")
        except AuditError as error:
            decision = _refused(decision, decision.outcome, Reason.AUDIT, str(error))
        return self._tell(decision)

    def _audit(self, decision: Decision, *, kind: str) -> None:
        identity = {"kind": kind, "policy": self.policy.name, "mode": self.mode.value}
        self.audit.write({**identity, **decision.as_dict()})

    def _tell(self, decision: Decision) -> Decision:
        self.refused.update(refusal.reason for refusal in decision.refusals)
        unaudited = any(refusal.reason is Reason.AUDIT for refusal in decision.refusals)
        bad = decision.outcome is Outcome.FAILED or self.failures or unaudited
        level = logging.WARNING if bad else logging.INFO
        if decision.outcome is not Outcome.OBSERVED:
            log.log(level, "%s", decision)
        if self.on_decision is not None:
            self.on_decision(decision)
        return decision


def _refused(decision: Decision, outcome: Outcome, reason: Reason, detail: str) -> Decision:
    return replace(decision, outcome=outcome, refusals=(*decision.refusals, Refusal(reason, None, detail)))


def _reason(error: Exception) -> Reason:
    return Reason.UNAUTHORIZED if isinstance(error, UnauthorizedError) else Reason.UNREACHABLE
