"""Conditions as the API conventions want them, and gate results without floats."""

from datetime import UTC, datetime

from kvpilot.k8s.gates import Gate, GateResult, Outcome
from kvpilot.k8s.status import Condition, Fact, find_condition, gate_entries, merge_conditions

BEFORE, NOW = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)


def merge(old, facts, now=NOW, generation=2):
    return merge_conditions(old, facts, generation=generation, now=now)


def test_a_transition_time_moves_with_the_status_alone():
    old, changes = merge([], {Condition.HOLDING: Fact(False, "Steady")}, BEFORE, 1)
    assert [change.first for change in changes] == [True]
    (same,), changes = merge(old, {Condition.HOLDING: Fact(False, "Steady", "new words")})
    assert not changes
    assert (same["lastTransitionTime"], same["observedGeneration"]) == ("2026-01-01T00:00:00Z", 2)
    (moved,), (change,) = merge(old, {Condition.HOLDING: Fact(True, "Rollout", "1 of 2")})
    assert moved["lastTransitionTime"] == "2026-01-02T00:00:00Z"
    assert (change.fact.reason, change.first) == ("Rollout", False)


def test_a_new_reason_is_a_change_without_a_transition():
    old, _ = merge([], {Condition.HOLDING: Fact(True, "Rollout")}, BEFORE)
    (merged,), changes = merge(old, {Condition.HOLDING: Fact(True, "Scaling")})
    assert [change.fact.reason for change in changes] == ["Scaling"]
    assert merged["lastTransitionTime"] == "2026-01-01T00:00:00Z"


def test_what_is_not_known_is_unknown_and_what_is_not_said_goes():
    old, _ = merge([], {Condition.CANARY_PASSED: Fact(None, "Observing")})
    assert old[0]["status"] == "Unknown"
    assert merge(old, {})[0] == []


def test_no_message_is_empty_or_too_long():
    facts = {
        Condition.ACCEPTED: Fact(True, "Valid"),
        Condition.DISTRIBUTED: Fact(True, "Written", "x" * 5000),
    }
    short, long = merge([], facts)[0]
    assert short["message"] == "Valid"
    assert len(long["message"]) == 1024


def test_a_condition_is_found_by_its_type():
    conditions, _ = merge([], {Condition.HOLDING: Fact(True, "Rollout")})
    found = find_condition({"conditions": conditions}, Condition.HOLDING)
    assert found is not None
    assert found["reason"] == "Rollout"
    assert find_condition({}, Condition.HOLDING) is None


def test_gate_results_are_integers_and_leave_out_what_was_not_measured():
    gate = Gate(metric="time_to_first_token_seconds", statistic="p99")
    measured = GateResult(gate=gate, outcome=Outcome.PASSED, canary=0.25, baseline=0.5, canary_samples=7)
    endless = GateResult(gate=gate, outcome=Outcome.FAILED, canary=float("inf"), baseline=0.5)
    first, second, third = gate_entries([measured, endless, GateResult(gate=gate, outcome=Outcome.MISSING)])
    assert (first["canaryMicro"], first["baselineMicro"], first["canarySamples"]) == (250_000, 500_000, 7)
    assert "canaryMicro" not in second
    assert second["baselineMicro"] == 500_000
    assert not {"canaryMicro", "baselineMicro"} & set(third)
    assert not any(isinstance(value, float) for entry in (first, second, third) for value in entry.values())
