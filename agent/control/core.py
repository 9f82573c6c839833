"""A decision as a function of what was seen: no clock, no network, no files. The audit log replays it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvpilot.agent import guard
from kvpilot.agent.control.nouns import Failure, Inputs, Outcome, RestartProposal
from kvpilot.agent.guard import GuardLimits, Memory, Reason, Refusal
from kvpilot.agent.guard.changes import check_quality, narrow
from kvpilot.agent.guard.review import is_open
from kvpilot.agent.policies.changes import clip_knob
from kvpilot.engine.config import KnobBounds
from kvpilot.env.observation import Observation
from kvpilot.env.policy import KnobValues, Proposal


class Proposer(Protocol):
    """A policy behind a deadline, or one in a replay."""

    def outside(self, observation: Observation) -> str:
        """How the observation differs from all that the policy was trained on; empty: it does not."""
        ...

    def reset(self) -> None: ...

    def propose(
        self, observation: Observation, knobs: KnobValues, bounds: Mapping[str, KnobBounds]
    ) -> Proposal | Failure: ...

    def propose_outside(
        self, observation: Observation, knobs: KnobValues, bounds: Mapping[str, KnobBounds]
    ) -> Proposal | Failure | None:
        """What stands in for the policy beyond its training envelope; None: hold."""
        ...


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`outcome` is OBSERVED, HELD, KEPT, ADVISED, or PENDING: then `changes` are to be written."""

    outcome: Outcome
    memory: Memory
    refusals: tuple[Refusal, ...] = ()
    wanted: Mapping[str, object] = field(default_factory=dict)
    reason: str = ""
    changes: Mapping[str, float | int] = field(default_factory=dict)
    proposals: tuple[RestartProposal, ...] = ()
    is_step_back: bool = False
    failure: Failure | None = None


def decide(
    memory: Memory,
    inputs: Inputs,
    limits: GuardLimits,
    policy: Proposer,
    how_to_restart: Callable[[str, float], str] = lambda knob, value: "see its documentation",
) -> Plan:
    """Observe -> review -> propose -> constrain. Pure but for the policy's own state."""
    if any(refusal.reason is Reason.RESET for refusal in inputs.problems):
        policy.reset()
        memory = replace(memory, watch=None, target=None, baseline=(), stalled=0)
    if inputs.control.killed or inputs.control.mode == "off":
        return _off(memory, inputs)
    looked = _look(memory, inputs, limits)
    if looked.memory.target is not None and not inputs.control.hold and inputs.control.acts:
        back = guard.towards(looked.memory.target, inputs.state.requested, inputs.state.bounds, limits)
        if back:
            return replace(looked, outcome=Outcome.PENDING, changes=back, is_step_back=True)
        looked = replace(looked, memory=replace(looked.memory, target=None))
    if not inputs.due:
        return looked if looked.refusals else replace(looked, outcome=Outcome.OBSERVED)
    if looked.refusals:
        return looked
    return _propose(looked, inputs, limits, policy, how_to_restart)


def _off(memory: Memory, inputs: Inputs) -> Plan:
    if not inputs.control.killed:
        return Plan(outcome=Outcome.OBSERVED, memory=memory)
    refusals = (*inputs.problems, Refusal(Reason.KILLED, None, inputs.control.killed))
    return Plan(outcome=Outcome.HELD, memory=memory, refusals=refusals)


def _look(memory: Memory, inputs: Inputs, limits: GuardLimits) -> Plan:
    """What speaks against any change; HELD even without refusals, until more is known."""
    held = list(inputs.problems)
    observation = inputs.observation
    if inputs.control.hold:
        held.append(Refusal(Reason.HOLD, None, inputs.control.hold))
    if observation is not None:
        checked = guard.check_observation(
            observation,
            windows_seen=inputs.windows_seen,
            now=observation.time + inputs.age_seconds,
            limits=limits,
        )
        held += checked
        # A standstill is seen in an observation that is otherwise too still to decide on.
        if all(refusal.reason is Reason.FROZEN for refusal in held):
            reviewed = guard.review(
                memory,
                observation,
                inputs.signals,
                inputs.state.requested,
                now=inputs.now,
                unix_time=inputs.unix_time,
                limits=limits,
                learn=inputs.due,
            )
            memory = reviewed.memory
            held += reviewed.refusals
    elif not held:
        held.append(Refusal(Reason.SOURCE, None, "nothing was observed"))
    return Plan(outcome=Outcome.HELD, memory=memory, refusals=tuple(held))


def _propose(
    plan: Plan,
    inputs: Inputs,
    limits: GuardLimits,
    policy: Proposer,
    how_to_restart: Callable[[str, float], str],
) -> Plan:
    observation, state = inputs.observation, inputs.state
    assert observation is not None, "without an observation there is a refusal"
    if is_open(plan.memory, inputs.now):
        detail = f"{plan.memory.failures} failures in a row"
        return replace(plan, refusals=(Refusal(Reason.BREAKER, None, detail),))
    strange = policy.outside(observation)
    beyond = (Refusal(Reason.OUTSIDE, None, strange),) if strange else ()
    if beyond:
        answer = policy.propose_outside(observation, state.requested, state.bounds)
        if answer is None:
            return replace(plan, refusals=beyond)
    else:
        answer = policy.propose(observation, state.requested, state.bounds)
    if isinstance(answer, Failure):
        memory = guard.note_failure(plan.memory, now=inputs.now, limits=limits)
        return replace(plan, memory=memory, refusals=(*beyond, answer.refusal), failure=answer)
    return _constrain(replace(plan, refusals=beyond), answer, inputs, limits, how_to_restart)


def _constrain(
    plan: Plan,
    proposal: Proposal,
    inputs: Inputs,
    limits: GuardLimits,
    how_to_restart: Callable[[str, float], str],
) -> Plan:
    state, memory = inputs.state, plan.memory
    verdict = guard.constrain(
        proposal.knobs,
        state.requested,
        state.bounds,
        last_change=memory.last_change(),
        now=inputs.now,
        limits=limits,
        pending=state.pending,
        classes=state.classes,
        moves=memory.moves,
        allowed=inputs.control.allowed,
    )
    changes, refusals = dict(verdict.changes), [*plan.refusals, *verdict.refusals]
    loss = inputs.signals.get("quality_loss")
    too_coarse = check_quality(changes, state.requested, loss, limits.quality_loss_budget)
    if too_coarse is not None:
        del changes["kv_level"]
        refusals.append(too_coarse)
    plan = replace(
        plan,
        wanted=dict(proposal.knobs),
        reason=proposal.reason,
        changes=changes,
        refusals=tuple(refusals),
        proposals=_restarts(proposal.knobs, inputs, verdict.refusals, how_to_restart),
    )
    if not changes:
        return replace(plan, outcome=Outcome.HELD if refusals else Outcome.KEPT)
    if inputs.control.acts:
        return replace(plan, outcome=Outcome.PENDING)
    if inputs.control.mode == "canary":
        only = Refusal(Reason.BASELINE, None, "this replica is the baseline: nothing is written")
    else:
        only = Refusal(Reason.ADVISORY, None, "nothing is written")
    return replace(plan, outcome=Outcome.ADVISED, refusals=(*plan.refusals, only))


def _restarts(
    wanted: Mapping[str, object],
    inputs: Inputs,
    refusals: list[Refusal],
    how_to_restart: Callable[[str, float], str],
) -> tuple[RestartProposal, ...]:
    """What the engine does not accept live is for a human; within bounds, in whole numbers where it must be."""
    proposals = []
    for refusal in refusals:
        value = wanted.get(refusal.knob or "")
        if refusal.reason is not Reason.NOT_HOT or isinstance(value, bool):
            continue
        if not isinstance(value, int | float) or not math.isfinite(value):
            continue
        assert refusal.knob is not None
        allowed = inputs.control.allowed.get(refusal.knob, (None, None))
        limit = narrow(inputs.state.bounds[refusal.knob], *allowed)
        inside = clip_knob(value, limit)
        how = how_to_restart(refusal.knob, inside)
        proposals.append(RestartProposal(knob=refusal.knob, value=inside, how=how))
    return tuple(proposals)
