"""The loop: observe -> propose -> constrain -> apply -> verify. Runs without torch, beside the engine.

What is decided is `core.decide`, a function; here it meets the world. The loop leaves the knobs where they
are whenever it stops, however it stops. The file is long so that what happens when a step of a tick fails is read
where the tick is.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

from kvpilot.agent import guard
from kvpilot.agent.control.audit import AuditError
from kvpilot.agent.control.client import EngineUnavailableError, KnobState, UnauthorizedError
from kvpilot.agent.control.core import Plan, decide
from kvpilot.agent.control.deadline import DeadlinePolicy
from kvpilot.agent.control.decision_log import DecisionLog
from kvpilot.agent.control.latch import Latch
from kvpilot.agent.control.nouns import (
    Control,
    Decision,
    Engine,
    Inputs,
    Mode,
    Outcome,
    inputs_as_dict,
    memory_as_dict,
)
from kvpilot.agent.control.observer import Observer
from kvpilot.agent.control.standing import Audit, Standing
from kvpilot.agent.control.state import StateError, StateFile
from kvpilot.agent.guard import GuardLimits, Memory, Reason, Refusal
from kvpilot.agent.guard.review import step_back
from kvpilot.agent.guard.slo import pressure
from kvpilot.engine.errors import KnobInvalidError, KnobStaleError
from kvpilot.env.policy import Policy
from kvpilot.exporter.source import ScrapeSource, Source

__all__ = ["Controller", "Decision", "Engine", "Mode", "Outcome"]

log = logging.getLogger("kvpilot.agent")
MAX_BACKOFF = 8  # intervals between two ticks, while the engine does not answer


class Listener(Protocol):
    """Told of every tick, after the audit log."""

    def __call__(self, decision: Decision, memory: Memory, inputs: Inputs | None) -> None: ...


class Controller:
    """One writer of one engine's knobs. `tick` is one round and never raises for what the world does."""

    def __init__(
        self,
        *,
        engine: Engine,
        policy: Policy,
        audit: Audit,
        mode: Mode = Mode.ADVISORY,
        limits: GuardLimits | None = None,
        source: Source | None = None,  # of observations; by default scrapes of `engine`
        window_seconds: float = 60.0,
        decide_every: int = 1,  # observations per decision
        control: Callable[[], Control] | None = None,  # instead of `mode`: what may be done changes
        state: StateFile | None = None,  # of safe mode; without one it ends with the process
        deadline_seconds: float = 5.0,
        fallback: Policy | None = None,  # beyond the policy's training envelope; None: hold
        how_to_restart: Callable[[str, float], str] | None = None,
        listener: Listener | None = None,
        span: Callable[[], AbstractContextManager[Callable[[Decision], None]]]
        | None = None,  # round each tick
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        fixed = Control(mode=mode, acts=mode is Mode.AUTO)
        self.engine, self.audit, self.state = engine, audit, state
        self.clock, self.unix_clock = clock, unix_clock
        self.observer = Observer(source or ScrapeSource(engine.scrape), clock)
        self._latch = Latch(state)
        self.limits, self.window_seconds = limits or GuardLimits(), window_seconds
        self.control = control or (lambda: fixed)
        self._standing = Standing(audit, unix_clock)
        self._decision_log = DecisionLog()
        self.listener = listener
        self.span = span or (lambda: nullcontext(lambda decision: None))
        self.how_to_restart = how_to_restart or (lambda knob, value: "see the engine's documentation")
        self.memory = Memory()
        self.refused: Counter[Reason] = Counter()
        self.failures = 0  # ticks in a row without an answer of the engine
        self._deadline_seconds, self._fallback = deadline_seconds, fallback
        self.set_policy(policy)
        self.decide_every = self._ticks_to_decision = decide_every
        self._revision: int | None = None  # the last one that this loop has seen or made
        self._in_doubt: dict[str, float | int] = {}  # written, but the answer was lost
        self._pending: dict[str, float | int] = {}  # accepted, not yet read back as effective

    @property
    def policy(self) -> Policy:
        return self._policy.policy

    def set_policy(self, policy: Policy) -> None:
        """From the next decision on."""
        self._policy = DeadlinePolicy(
            policy, deadline_seconds=self._deadline_seconds, fallback=self._fallback
        )

    def run(self, stop: threading.Event, interval_seconds: float | Callable[[], float]) -> None:
        """Ticks until `stop` is set; backs off while the engine does not answer."""
        while not stop.is_set():
            started = time.monotonic()
            try:
                with self.span() as describe:
                    describe(self.tick())
            except Exception:
                log.exception("held: this tick failed")
            interval = interval_seconds() if callable(interval_seconds) else interval_seconds
            backoff = min(2 ** max(self.failures - 1, 0), MAX_BACKOFF)
            stop.wait(max(interval * backoff - (time.monotonic() - started), 0.0))

    def tick(self) -> Decision:
        """Observe, propose, constrain, apply, verify."""
        control = self._standing.follow(self.control())
        try:
            state = self.engine.knobs()
        except (EngineUnavailableError, UnauthorizedError) as error:
            return self._lost(error)
        inputs = self._observe(control, state)
        self._settle(state)
        try:
            before = self._latch.recall(self.memory, inputs, self.limits)
        except StateError as error:
            refusal = Refusal(Reason.SAFE_MODE, None, str(error))
            return self._tell(_refused(_draft(inputs), Outcome.HELD, refusal), inputs)
        plan = decide(before, inputs, self.limits, self._policy, self.how_to_restart)
        self.memory = plan.memory
        self._latch.keep(self.memory)
        decision = replace(
            _draft(inputs),
            outcome=plan.outcome,
            reason=plan.reason,
            wanted=plan.wanted,
            changes=plan.changes,
            refusals=plan.refusals,
            proposals=plan.proposals,
            is_step_back=plan.is_step_back,
        )
        if plan.outcome is Outcome.OBSERVED or (plan.outcome is Outcome.HELD and not inputs.due):
            return self._tell(replace(decision, outcome=Outcome.OBSERVED), inputs)
        replayable = _replayable(before, inputs, plan)
        if plan.outcome is Outcome.PENDING:
            return self._apply(decision, inputs, replayable)
        return self._record(decision, inputs, replayable)

    def _observe(self, control: Control, state: KnobState) -> Inputs:
        seen = self.observer.look(self.window_seconds, self.limits.slo)
        self.failures = self.observer.failures
        restarted = any(problem.reason is Reason.RESET for problem in seen.problems)
        problems = [*seen.problems, *self._check_writer(state, restarted)]
        self._ticks_to_decision -= 1
        due = self._ticks_to_decision <= 0 or bool(problems)
        if due:
            self._ticks_to_decision = self.decide_every
        return Inputs(
            now=self.clock(),
            unix_time=self.unix_clock(),
            control=control,
            state=state,
            observation=seen.observation,
            age_seconds=seen.age_seconds,
            windows_seen=self.observer.windows_seen,
            signals=dict(seen.signals),
            problems=tuple(problems),
            reuse_seconds=seen.reuse_seconds,
            due=due,
        )

    def _check_writer(self, state: KnobState, restarted: bool) -> list[Refusal]:
        """One writer: a revision that this loop did not make freezes it, unless the engine begins to count anew."""
        known, self._revision = self._revision, state.revision
        doubt, self._in_doubt = self._in_doubt, {}
        if known is None or known == state.revision or restarted:
            return []
        if doubt and all(state.requested.get(name) == value for name, value in doubt.items()):
            log.info("the change whose answer was lost has been applied: revision %s", state.revision)
            return []
        self.memory = guard.note_conflict(self.memory, now=self.clock(), limits=self.limits)
        return [Refusal(Reason.CONFLICT, None, f"revision {known} became {state.revision}")]

    def _apply(self, draft: Decision, inputs: Inputs, replayable: dict[str, Any]) -> Decision:
        """Writes the intent to the audit log, then the knobs, then reads them back."""
        held = self._record_intent(draft, replayable)
        if held is not None:
            draft = _refused(draft, Outcome.HELD, held)
            if not draft.is_step_back:
                return self._tell(draft, inputs)
            log.error("undone without a line of its own: where to was on record before the change was made")
        self._remember(draft, inputs)
        known = {"id": replayable["id"]}
        try:
            result = self.engine.patch(draft.changes, expected_revision=draft.revision)
            self._revision = result.revision
            state = self.engine.knobs()
        except KnobStaleError as error:
            self.memory = guard.note_conflict(self.memory, now=self.clock(), limits=self.limits)
            return self._record(
                _refused(draft, Outcome.HELD, Refusal(Reason.CONFLICT, None, str(error))), inputs
            )
        except KnobInvalidError as error:
            return self._failed(draft, inputs, known, Refusal(Reason.INVALID, None, str(error)))
        except (EngineUnavailableError, UnauthorizedError) as error:
            self._in_doubt = dict(draft.changes)
            return self._failed(draft, inputs, known, Refusal(_reason(error), None, str(error)))
        draft = replace(draft, knobs=dict(state.effective), revision=result.revision)
        missing = [name for name, value in draft.changes.items() if state.requested.get(name) != value]
        if missing and state.revision == result.revision:
            self.memory = step_back(self.memory, inputs.state.requested, state.requested)
            detail = f"accepted, but {', '.join(missing)} did not change"
            return self._failed(draft, inputs, known, Refusal(Reason.PARTIAL, None, detail))
        self.memory = guard.note_success(self.memory)
        effective = all(state.effective.get(name) == value for name, value in draft.changes.items())
        self._pending = {} if effective else dict(draft.changes)
        done = Outcome.STEPPED_BACK if draft.is_step_back else Outcome.APPLIED
        return self._record(replace(draft, outcome=done if effective else Outcome.PENDING), inputs, known)

    def _record_intent(self, draft: Decision, replayable: dict[str, Any]) -> Refusal | None:
        """No audit, no action; and none whose trial a crash would end."""
        if self._latch.problem:
            return Refusal(Reason.SAFE_MODE, None, self._latch.problem)
        try:
            self._audit(draft, "intent", replayable)
        except AuditError as error:
            return Refusal(Reason.AUDIT, None, str(error))
        return None

    def _remember(self, draft: Decision, inputs: Inputs) -> None:
        self.memory = guard.note_change(
            self.memory,
            draft.changes,
            inputs.state.requested,
            now=self.clock(),
            limits=self.limits,
            load=pressure(inputs.signals, self.limits.slo),
            reuse_seconds=inputs.reuse_seconds,
            unix_time=inputs.unix_time,
        )
        self._latch.keep(self.memory)

    def _failed(self, draft: Decision, inputs: Inputs, known: dict[str, Any], refusal: Refusal) -> Decision:
        self.memory = guard.note_failure(self.memory, now=self.clock(), limits=self.limits)
        return self._record(_refused(draft, Outcome.FAILED, refusal), inputs, known)

    def _settle(self, state: KnobState) -> None:
        """Says so when a pending change has become effective."""
        arrived = {name: value for name, value in self._pending.items() if state.effective.get(name) == value}
        if arrived and not set(arrived) & set(state.pending):
            self._pending = {}
            knobs = dict(state.effective)
            done = Decision(time=self.unix_clock(), outcome=Outcome.EFFECTIVE, changes=arrived, knobs=knobs)
            self._record(replace(done, revision=state.revision), None)

    def _lost(self, error: EngineUnavailableError | UnauthorizedError) -> Decision:
        self.failures += 1
        held = Decision(time=self.unix_clock(), outcome=Outcome.HELD)
        return self._record(_refused(held, Outcome.HELD, Refusal(_reason(error), None, str(error))), None)

    def _record(
        self, decision: Decision, inputs: Inputs | None, replayable: dict[str, Any] | None = None
    ) -> Decision:
        """A decision that wrote nothing, or whose intent is on record, survives a failing audit log."""
        try:
            self._audit(decision, "decision", replayable)
        except AuditError as error:
            decision = _refused(decision, decision.outcome, Refusal(Reason.AUDIT, None, str(error)))
        return self._tell(decision, inputs)

    def _audit(self, decision: Decision, kind: str, replayable: dict[str, Any] | None) -> None:
        mode = self._standing.control.mode.value if self._standing.control else ""
        record = {"kind": kind, "policy": self.policy.name, "mode": mode, **decision.as_dict()}
        if replayable is not None:
            record["replay"] = replayable
        self.audit.write(record)

    def _tell(self, decision: Decision, inputs: Inputs | None) -> Decision:
        self.refused.update(refusal.reason for refusal in decision.refusals)
        unaudited = any(refusal.reason is Reason.AUDIT for refusal in decision.refusals)
        bad = decision.outcome is Outcome.FAILED or self.failures or unaudited or decision.is_step_back
        level = logging.WARNING if bad else logging.INFO
        if decision.outcome is not Outcome.OBSERVED:
            self._decision_log.say(decision, level)
        if self.listener is not None:
            self.listener(decision, self.memory, inputs)
        return decision


def _draft(inputs: Inputs) -> Decision:
    return Decision(
        time=inputs.unix_time,
        outcome=Outcome.OBSERVED,
        observation=inputs.observation,
        knobs=dict(inputs.state.effective),
        revision=inputs.state.revision,
    )


def _replayable(before: Memory, inputs: Inputs, plan: Plan) -> dict[str, Any]:
    """What it takes to take the decision again; the policy and the limits stand in the line of kind `setup`."""
    failure = None if plan.failure is None else list(plan.failure.refusal)
    return {
        "id": f"{inputs.unix_time:.6f}",
        "memory": memory_as_dict(before),
        "inputs": inputs_as_dict(inputs),
        "failure": failure,
        "plan": plan.outcome.value,
    }


def _refused(decision: Decision, outcome: Outcome, refusal: Refusal) -> Decision:
    return replace(decision, outcome=outcome, refusals=(*decision.refusals, refusal))


def _reason(error: Exception) -> Reason:
    return Reason.UNAUTHORIZED if isinstance(error, UnauthorizedError) else Reason.UNREACHABLE
