"""The status of a KVPolicy: conditions as the Kubernetes API conventions want them. Pure."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, NamedTuple

from kvpilot.k8s.gates import GateResult

MESSAGE_LIMIT = 1024
MICRO = 1_000_000


class Condition(StrEnum):
    ACCEPTED = "Accepted"  # the specification is valid and no older KVPolicy has the same target
    TARGET_FOUND = "TargetFound"
    POLICY_READY = "PolicyReady"  # the policy exists, has the hash, and the pods can read it
    HOLDING = "Holding"  # nothing may be changed just now
    DISTRIBUTED = "Distributed"  # the control document is in the ConfigMap
    CANARY_PASSED = "CanaryPassed"  # of this generation; absent unless the mode is canary


class Fact(NamedTuple):
    """What is to be said of one condition. `status` None is Unknown."""

    status: bool | None
    reason: str  # one word in CamelCase
    message: str = ""


class Change(NamedTuple):
    condition: Condition
    fact: Fact
    first: bool  # the condition was not there before

    @property
    def is_warning(self) -> bool:
        return self.fact.status is False and self.condition is not Condition.HOLDING

    @property
    def is_event(self) -> bool:
        """All changes are, but of what is there for the first time only what is not as it should be."""
        usual = self.fact.status is (self.condition is not Condition.HOLDING)
        return not (self.first and usual) or self.condition is Condition.CANARY_PASSED


def rfc3339(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def find_condition(status: Mapping[str, Any], condition: Condition) -> Mapping[str, Any] | None:
    return next((each for each in status.get("conditions", []) if each["type"] == condition), None)


def merge_conditions(
    old: Sequence[Mapping[str, Any]], facts: Mapping[Condition, Fact], *, generation: int, now: datetime
) -> tuple[list[dict[str, Any]], list[Change]]:
    """The new list, and what has changed in status or reason. A transition time moves with the status alone."""
    before = {each["type"]: each for each in old}
    merged: list[dict[str, Any]] = []
    changes: list[Change] = []
    for condition, fact in facts.items():
        previous = before.get(condition, {})
        status = {True: "True", False: "False", None: "Unknown"}[fact.status]
        same = previous.get("status") == status
        merged.append(
            {
                "type": condition.value,
                "status": status,
                "reason": fact.reason,
                "message": (fact.message or fact.reason)[:MESSAGE_LIMIT],  # old API servers read "" as null
                "observedGeneration": generation,
                "lastTransitionTime": previous["lastTransitionTime"] if same else rfc3339(now),
            }
        )
        if not same or previous.get("reason") != fact.reason:
            changes.append(Change(condition, fact, not previous))
    return merged, changes


def gate_entries(results: Sequence[GateResult]) -> list[dict[str, Any]]:
    """Gate results without floats: values in millionths of the metric's unit, absent where none was measured."""
    entries = []
    for result in results:
        entry = {
            "metric": result.gate.metric,
            "statistic": result.gate.statistic,
            "outcome": result.outcome.value,
            "canarySamples": result.canary_samples,
            "baselineSamples": result.baseline_samples,
        }
        for side, value in (("canaryMicro", result.canary), ("baselineMicro", result.baseline)):
            if abs(value) < float("inf"):  # neither nan nor beyond the last bucket
                entry[side] = round(value * MICRO)
        entries.append(entry)
    return entries
