"""The operator as a process against a real API server: documents, conditions, events."""

import pytest

pytestmark = pytest.mark.e2e


def test_a_policy_becomes_a_document_conditions_and_events(cluster, start_operator):
    name = cluster.new_name()
    cluster.deploy(name, 2)
    cluster.create_policy(
        name, mode="advisory", slo={"ttftP99Milliseconds": 900}, bounds={"maxBatch": {"high": 8}}
    )
    start_operator()
    document = cluster.wait_for_document(name, mode="advisory")
    assert document == {
        "schema": 1,
        "revision": 1,
        "mode": "advisory",
        "kill": False,
        "policy": {"name": "threshold"},
        "slo": {"ttft_p99_milliseconds": 900},
        "bounds": {"max_batch": {"high": 8}},
    }
    cluster.wait_for_condition(name, "Distributed", "True", "Written")
    status = cluster.get("KVPolicy", name)["status"]
    assert (status["observedGeneration"], status["revision"], status["effectiveMode"]) == (1, 1, "advisory")
    assert {c["type"]: (c["status"], c["observedGeneration"]) for c in status["conditions"]} == {
        "Accepted": ("True", 1),
        "TargetFound": ("True", 1),
        "PolicyReady": ("True", 1),
        "Holding": ("False", 1),
        "Distributed": ("True", 1),
    }
    assert cluster.events(name) == [("Normal", "ModeChanged")]
