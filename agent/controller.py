"""The loop: observe -> propose -> constrain -> apply -> verify. Runs without torch, beside the engine.

What is decided is `control_core.decide`, a function; here it meets the world. The loop leaves the knobs where they
are whenever it stops, however it stops.
"""

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

from kvpilot.agent import guard
from kvpilot.agent.audit import AuditError
from kvpilot.agent.client import EngineUnavailableError, KnobState, UnauthorizedError
from kvpilot.agent.control_core import Plan, decide
from kvpilot.agent.control_nouns import (
    Control,
    Decision,
    Engine,
    Inputs,
    Mode,
    Outcome,
    inputs_as_dict,
    memory_as_dict,
)
from kvpilot.agent.control_policy import DeadlinePolicy
from kvpilot.agent.control_signals import reuse_seconds, signals_of, slo_of
from kvpilot.agent.control_state import SafeState, StateError, StateFile
from kvpilot.agent.guard import GuardLimits, Memory, Reason, Refusal
from kvpilot.agent.guard.review import resume, step_back
from kvpilot.agent.guard.slo import pressure
from kvpilot.engine.errors import KnobInvalidError, KnobStaleError
from kvpilot.engine.stats import StatsWindow
from kvpilot.env.observation import Observation, observe
from kvpilot.env.policy import Policy
from kvpilot.exporter.source import NoHistoryError, ScrapeSource, Source, SourceError

__all__ = ["Controller", "Decision", "Engine", "Mode", "Outcome"]

log = logging.getLogger("kvpilot.agent")
MAX_BACKOFF = 8  # intervals between two ticks, while the engine does not answer


class Audit(Protocol):
    """AuditLog is the one on disk."""

    def write(self, record: dict[str, object]) -> None: ...


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
        on_decision: Callable[[Decision], None] | None = None,
        listener: Listener | None = None,
        span: Callable[[], AbstractContextManager[Callable[[Decision], None]]]
        | None = None,  # round each tick
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        fixed = Control(mode=mode, acts=mode is Mode.AUTO)
        self.engine, self.audit, self.state = engine, audit, state
        self.clock, self.unix_clock = clock, unix_clock
        self.source = source or ScrapeSource(engine.scrape)
        self.limits, self.window_seconds, self.decide_every = (
            limits or GuardLimits(),
            window_seconds,
            decide_every,
        )
        self.control = control or (lambda: fixed)
        self.on_decision, self.listener = on_decision, listener
        self.span = span or (lambda: nullcontext(lambda decision: None))
        self.how_to_restart = how_to_restart or (lambda knob, value: "see the engine's documentation")
        self.memory = Memory()
        self._control: Control | None = None  # at the last tick
        self.refused: Counter[Reason] = Counter()
        self.failures = 0  # ticks in a row without an answer of the engine
        self._deadline_seconds, self._fallback = deadline_seconds, fallback
        self.set_policy(policy)
        self._has_begun = False
        self._windows_seen = 0
        self._offset = math.inf  # this clock minus the engine's, as small as ever seen
        self._ticks_to_decision = decide_every
        self._revision: int | None = None  # the last one that this loop has seen or made
        self._in_doubt: dict[str, float | int] = {}  # written, but the answer was lost
        self._pending: dict[str, float | int] = {}  # accepted, not yet read back as effective

    @property
    def policy(self) -> Policy:
        return self._policy.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self.set_policy(policy)

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
        control = self._follow_control()
        try:
            state = self.engine.knobs()
        except (EngineUnavailableError, UnauthorizedError) as error:
            return self._lost(error)
        inputs = self._observe(control, state)
        self._settle(state)
        before = self._recall(inputs)
        if isinstance(before, Refusal):
            return self._tell(_refused(_draft(inputs), Outcome.HELD, before), inputs)
        plan = decide(before, inputs, self.limits, self._policy, self.how_to_restart)
        self._keep(plan.memory)
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

    def _follow_control(self) -> Control:
        """What may be done now; said when it changes, whether or not a decision is due."""
        before, self._control = self._control, self.control()
        control = self._control
        if before is None or (before.mode, before.acts) != (control.mode, control.acts):
            log.warning(
                "mode %s: %s", control.mode, "decisions are written" if control.acts else "nothing is written"
            )
        for name, was, now in (
            ("killed", before and before.killed, control.killed),
            ("on hold", before and before.hold, control.hold),
        ):
            if (was or "") != now:
                log.warning("%s: %s", name if now else f"no longer {name}", now or was)
        return control

    def _observe(self, control: Control, state: KnobState) -> Inputs:
        problems: list[Refusal] = []
        window: StatsWindow | None = None
        try:
            window = self.source.window(self.window_seconds)
            self.failures = 0
        except NoHistoryError as error:
            self.failures = 0
            problems.append(Refusal(Reason.WARMUP, None, str(error)))
        except SourceError as error:
            self.failures += 1
            problems.append(Refusal(Reason.SOURCE, None, str(error)))
        observation = self._follow(window, problems) if window is not None else None
        problems += self._check_writer(state)
        self._ticks_to_decision -= 1
        due = self._ticks_to_decision <= 0 or bool(problems)
        if due:
            self._ticks_to_decision = self.decide_every
        now = self.clock()
        return Inputs(
            now=now,
            unix_time=self.unix_clock(),
            control=control,
            state=state,
            observation=observation,
            age_seconds=0.0 if observation is None else now - self._offset - observation.time,
            windows_seen=self._windows_seen,
            signals=signals_of(window, observation) if window is not None and observation is not None else {},
            problems=tuple(problems),
            reuse_seconds=reuse_seconds(window) if window is not None and observation is not None else None,
            due=due,
        )

    def _follow(self, window: StatsWindow, problems: list[Refusal]) -> Observation | None:
        """The observation, on a clock that is compared with ours; none across a restart."""
        if window.is_reset():
            self._windows_seen, self._offset = 0, math.inf
            problems.append(Refusal(Reason.RESET, None, "a counter went down: the engine restarted"))
            return None
        self._offset = min(self._offset, self.clock() - window.end.time)
        self._windows_seen += 1
        return observe(window, slo_of(self.limits.slo))

    def _check_writer(self, state: KnobState) -> list[Refusal]:
        """One writer: a revision that this loop did not make freezes it."""
        known, self._revision = self._revision, state.revision
        doubt, self._in_doubt = self._in_doubt, {}
        if known is None or known == state.revision:
            return []
        if doubt and all(state.requested.get(name) == value for name, value in doubt.items()):
            log.info("the change whose answer was lost has been applied: revision %s", state.revision)
            return []
        self.memory = guard.note_conflict(self.memory, now=self.clock(), limits=self.limits)
        return [Refusal(Reason.CONFLICT, None, f"revision {known} became {state.revision}")]

    def _recall(self, inputs: Inputs) -> Memory | Refusal:
        """The memory with what the state file says: another process may have released the latch."""
        if self.state is None:
            return self.memory
        try:
            saved = self.state.read()
        except StateError as error:
            return Refusal(Reason.SAFE_MODE, None, str(error))
        memory = replace(self.memory, safe_mode=saved.safe_mode, reverts=saved.reverts)
        begins, self._has_begun = not self._has_begun, True
        if not begins or saved.trial is None:
            return memory
        return resume(
            memory,
            saved.trial,
            inputs.state.requested,
            now=inputs.now,
            unix_time=inputs.unix_time,
            limits=self.limits,
        )

    def _keep(self, memory: Memory) -> None:
        self.memory = memory
        if self.state is None:
            return
        safe = SafeState(memory.safe_mode, memory.reverts, memory.watch)
        try:
            if safe != self.state.read():
                self.state.write(safe)
        except StateError as error:
            log.error("the next decisions are held: %s", error)

    def _apply(self, draft: Decision, inputs: Inputs, replayable: dict[str, Any]) -> Decision:
        """Writes the intent to the audit log, then the knobs, then reads them back."""
        try:
            self._audit(draft, "intent", replayable)
        except AuditError as error:
            return self._tell(_refused(draft, Outcome.HELD, Refusal(Reason.AUDIT, None, str(error))), inputs)
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
        self._keep(self.memory)

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
        identity = {
            "kind": kind,
            "policy": self.policy.name,
            "mode": self._control.mode.value if self._control else "",
        }
        record = {**identity, **decision.as_dict()}
        if replayable is not None:
            record["replay"] = replayable
        self.audit.write(record)

    def _tell(self, decision: Decision, inputs: Inputs | None) -> Decision:
        self.refused.update(refusal.reason for refusal in decision.refusals)
        unaudited = any(refusal.reason is Reason.AUDIT for refusal in decision.refusals)
        bad = decision.outcome is Outcome.FAILED or self.failures or unaudited or decision.is_step_back
        level = logging.WARNING if bad else logging.INFO
        if decision.outcome is not Outcome.OBSERVED:
            log.log(level, "%s", decision, extra={"decision": decision})
        if self.on_decision is not None:
            self.on_decision(decision)
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
