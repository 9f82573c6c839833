"""Takes the decisions of an audit log again: same inputs, policy and limits, same outcome, or it says where not."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kvpilot.agent.control.audit import AuditLine
from kvpilot.agent.control.core import Plan, decide
from kvpilot.agent.control.deadline import DeadlinePolicy, checked_proposal
from kvpilot.agent.control.loaded_policy import load
from kvpilot.agent.control.nouns import Failure, inputs_from_dict, memory_from_dict, refusal_from
from kvpilot.agent.guard import GuardLimits, Reason
from kvpilot.agent.guard.limits import limits_from_dict
from kvpilot.engine.config import KnobBounds
from kvpilot.engine.errors import ConfigError, KVPilotError
from kvpilot.env.observation import Observation
from kvpilot.env.policy import KnobValues, Policy, Proposal

UNANSWERED = "the policy still has not answered"  # an earlier call: this one was never made


class Difference(NamedTuple):
    line: int
    field: str
    recorded: object
    replayed: object

    def __str__(self) -> str:
        return f"line {self.line}: {self.field} was {self.recorded!r:.200}, replayed {self.replayed!r:.200}"


class ReplayReport(NamedTuple):
    decisions: int  # taken again
    differences: list[Difference]
    skipped: int  # records of the world, such as an engine that did not answer: there was nothing to decide


class RecordedPolicy:
    """The policy itself, and the recorded failure where it failed: what hung then need not hang now."""

    def __init__(self, policy: Policy, fallback: Policy | None) -> None:
        self._policy, self._fallback = policy, fallback
        self._deadline = DeadlinePolicy(
            policy, deadline_seconds=1.0, fallback=fallback
        )  # for `outside` alone
        self.failure: Failure | None = None

    def outside(self, observation: Observation) -> str:
        return self._deadline.outside(observation)

    def reset(self) -> None:
        for one in (self._policy, self._fallback):
            if one is not None:
                one.reset()

    def propose(
        self, observation: Observation, knobs: KnobValues, bounds: Mapping[str, KnobBounds]
    ) -> Proposal | Failure:
        return self._ask(self._policy, observation, knobs, bounds)

    def propose_outside(
        self, observation: Observation, knobs: KnobValues, bounds: Mapping[str, KnobBounds]
    ) -> Proposal | Failure | None:
        return None if self._fallback is None else self._ask(self._fallback, observation, knobs, bounds)

    def _ask(
        self, policy: Policy, observation: Observation, knobs: KnobValues, bounds: Mapping[str, KnobBounds]
    ) -> Proposal | Failure:
        if self.failure is None:
            return checked_proposal(policy.propose(observation, knobs, bounds))
        if not self.failure.refusal.detail.startswith(UNANSWERED):
            try:  # it was asked, and saw the observation
                policy.propose(observation, knobs, bounds)
            except Exception as error:
                if self.failure.refusal.reason is not Reason.POLICY:
                    raise ConfigError(f"the policy failed in the replay alone: {error!r}") from error
        return self.failure


def replay(lines: Iterable[AuditLine]) -> ReplayReport:
    """Raises ConfigError where the log does not begin with its setup, or names a policy that is not the same now."""
    policy: RecordedPolicy | None = None
    limits: GuardLimits | None = None
    digest = ""
    report = ReplayReport(0, [], 0)
    for line in lines:
        record = line.record
        if line.kind == "setup":
            limits = limits_from_dict(record["limits"])
            if policy is None or record["policy_hash"] != digest or record["is_start"]:
                policy, digest = _policy_of(line), record["policy_hash"]
            continue
        recorded = record.get("replay")
        if recorded is None:
            report = report._replace(skipped=report.skipped + (line.kind == "decision"))
            continue
        if "inputs" not in recorded:  # the outcome of an intent, which has been replayed
            continue
        if policy is None or limits is None:
            raise ConfigError(
                f"line {line.number}: no line of kind 'setup' before it: the log's beginning is missing"
            )
        report.differences.extend(_replay_one(line, recorded, limits, policy))
        report = report._replace(decisions=report.decisions + 1)
    return report


def _policy_of(line: AuditLine) -> RecordedPolicy:
    record = line.record
    try:
        loaded = load(record["policy_spec"])
    except KVPilotError as error:
        raise ConfigError(f"line {line.number}: the policy cannot be loaded: {error}") from error
    if loaded.digest != record["policy_hash"]:
        raise ConfigError(
            f"line {line.number}: policy {record['policy_spec']!r} has hash {loaded.digest:.12}, "
            f"the log's had {record['policy_hash']:.12}: give the file that was used then"
        )
    fallback = load("threshold").policy if record["fallback"] == "threshold" else None
    return RecordedPolicy(loaded.policy, fallback)


def _replay_one(
    line: AuditLine, recorded: Mapping[str, Any], limits: GuardLimits, policy: RecordedPolicy
) -> list[Difference]:
    failure = recorded["failure"]
    policy.failure = None if failure is None else Failure(refusal_from(failure))
    inputs = inputs_from_dict(recorded["inputs"])
    try:
        plan = decide(memory_from_dict(recorded["memory"]), inputs, limits, policy)
    except Exception as error:  # noqa: BLE001 - a policy may raise anything; here it is a finding
        return [Difference(line.number, "plan", recorded["plan"], repr(error))]
    return [
        Difference(line.number, name, was, now)
        for name, was, now in _compared(line.record, recorded, plan)
        if was != now
    ]


def _compared(
    record: Mapping[str, Any], recorded: Mapping[str, Any], plan: Plan
) -> list[tuple[str, object, object]]:
    was = [(entry["reason"], entry["knob"], entry["detail"]) for entry in record["constraints"]]
    now = [(refusal.reason.value, refusal.knob, refusal.detail) for refusal in plan.refusals]
    return [
        ("plan", recorded["plan"], plan.outcome.value),
        ("reason", record["reason"], plan.reason),
        ("changes", record["changes"], dict(plan.changes)),
        ("wanted", record["wanted"], {name: repr(value) for name, value in plan.wanted.items()}),
        ("constraints", was[: len(now)], now),  # what the world added came after
    ]
