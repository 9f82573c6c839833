"""The operator as a process, with its service account's rights, against a real API server."""

import hashlib
from pathlib import Path

import httpx
import pytest

from kvpilot.agent.control.switches import Switches
from kvpilot.k8s.control_source import ControlSource, WatchConfig

pytestmark = pytest.mark.e2e
GATE = {"metric": "time_to_first_token_seconds", "statistic": "p99"}


@pytest.fixture
def target(cluster, start_operator):
    """A steady Deployment of two pods, and an operator."""
    name = cluster.new_name()
    cluster.deploy(name, 2)
    start_operator()
    return name


def test_a_policy_becomes_a_document_conditions_and_events(cluster, target):
    cluster.create_policy(
        target, mode="advisory", slo={"ttftP99Milliseconds": 900}, bounds={"maxBatch": {"high": 8}}
    )
    document = cluster.wait_for_document(target, mode="advisory")
    assert document == {
        "schema": 1,
        "revision": document["revision"],
        "mode": "advisory",
        "kill": False,
        "policy": {"name": "threshold"},
        "slo": {"ttft_p99_milliseconds": 900},
        "bounds": {"max_batch": {"high": 8}},
    }
    cluster.wait_for_condition(target, "Distributed", "True", "Written")
    status = cluster.get("KVPolicy", target)["status"]
    assert (status["observedGeneration"], status["revision"], status["effectiveMode"]) == (
        *(1, document["revision"], "advisory"),
    )
    assert {c["type"]: (c["status"], c["observedGeneration"]) for c in status["conditions"]} == {
        "Accepted": ("True", 1),
        "TargetFound": ("True", 1),
        "PolicyReady": ("True", 1),
        "Holding": ("False", 1),
        "Distributed": ("True", 1),
    }
    cluster.wait_for_events(target, [("Normal", "ModeChanged")])
    cluster.patch("KVPolicy", target, {"spec": {"mode": "auto"}})
    assert cluster.wait_for_document(target, mode="auto")["revision"] > document["revision"]
    cluster.wait_for_events(target, [("Normal", "ModeChanged"), ("Normal", "ModeChanged")])
    after = cluster.get("KVPolicy", target)["status"]
    assert (after["observedGeneration"], after["effectiveMode"]) == (2, "auto")
    times = [[c["lastTransitionTime"] for c in each["conditions"]] for each in (status, after)]
    assert times[0] == times[1]  # no condition has changed its status


def test_nothing_is_written_while_nothing_changes(cluster, target, helpers):
    cluster.create_policy(target)
    cluster.wait_for_condition(target, "Distributed", "True", "Written")
    lease = f"kvpilot-deployment-{target}"

    def versions() -> list[str]:
        objects = (("KVPolicy", target), ("ConfigMap", f"{target}-control"))
        return [cluster.get(*each)["metadata"]["resourceVersion"] for each in objects]

    def renewed() -> str:
        return cluster.get("Lease", lease)["spec"]["renewTime"]

    before = versions()
    for _ in range(3):  # rounds are more frequent than renewals
        last = renewed()
        helpers.wait_for(lambda last=last: renewed() != last, "the operator is alive")
    assert versions() == before


@pytest.fixture
def sidecar(cluster, tmp_path):
    """What the sidecar of kvpilot-engine reads its document with: the token of its service account, a watch."""
    (tmp_path / "token").write_text(cluster.server.account_token("kvpilot-engine"))
    watch = WatchConfig(
        config_map="kvpilot-engine-control",
        namespace="kvpilot",
        server=cluster.server.url,
        token_file=tmp_path / "token",
        ca_file=Path(cluster.server.ca_file),
    )
    source = ControlSource(watch)
    source.start()
    yield Switches(document=source, pod_name="a-pod")
    source.close()


def test_a_change_of_mode_reaches_the_sidecar_in_seconds(cluster, start_operator, sidecar, helpers):
    name = "kvpilot-engine"
    cluster.deploy(name, 2)
    start_operator()
    cluster.create_policy(name)

    def arrives(mode: str, *, acts: bool, seconds: float = 20) -> None:
        def there() -> bool:
            control = sidecar()
            return (control.mode, control.acts) == (mode, acts) and not control.hold

        helpers.wait_for(there, f"mode {mode} at the sidecar: {sidecar()}", seconds)

    arrives("advisory", acts=False, seconds=60)
    for mode in (
        "auto",
        "off",
        "advisory",
        "auto",
    ):  # a mounted ConfigMap alone would take up to a minute each
        cluster.patch("KVPolicy", name, {"spec": {"mode": mode}})
        arrives(mode, acts=mode == "auto")
    cluster.patch("KVPolicy", name, {"spec": {"mode": "canary"}})
    arrives("canary", acts=False)  # a-pod is none of the pods: it would be the baseline
    cluster.patch("KVPolicy", name, {"spec": {"mode": "auto", "killSwitch": True}})
    helpers.wait_for(lambda: sidecar().killed, "the kill switch at the sidecar", 20)
    assert not sidecar().acts
    cluster.patch("KVPolicy", name, {"spec": {"killSwitch": False}})
    arrives("auto", acts=True)
    last = sidecar.document.document.revision
    cluster.delete("KVPolicy", name)
    helpers.wait_for(lambda: sidecar().hold, "without a document everything is held")
    cluster.create_policy(name, mode="auto")
    arrives("auto", acts=True)
    assert sidecar.document.document.revision > last


def test_a_sidecar_without_an_api_server_reads_the_mounted_file(cluster, tmp_path):
    (tmp_path / "token").write_text("not a token of this cluster")
    (tmp_path / "control.yaml").write_text("revision: 3\nmode: auto\n")
    watch = WatchConfig(
        config_map="kvpilot-engine-control",
        namespace="kvpilot",
        server=cluster.server.url,
        token_file=tmp_path / "token",
        ca_file=Path(cluster.server.ca_file),
    )
    source = ControlSource(watch, file=tmp_path / "control.yaml")
    source.start()
    assert source.refresh()
    assert source.document is not None
    assert (source.document.mode, source.problem) == ("auto", "")
    (tmp_path / "control.yaml").unlink()
    assert not source.refresh()
    assert "401" in source.problem
    assert source.document.mode == "auto"
    source.close()


def test_the_kill_switch_on_the_workload_needs_no_right_on_the_policy(cluster, target):
    cluster.create_policy(target, mode="auto")
    cluster.wait_for_document(target, mode="auto", kill=False)
    cluster.patch("Deployment", target, {"metadata": {"annotations": {"kvpilot.dev/kill": "true"}}})
    cluster.wait_for_document(target, kill=True)
    cluster.wait_for_events(target, [("Normal", "ModeChanged"), ("Warning", "ModeChanged")])
    assert cluster.get("KVPolicy", target)["status"]["effectiveMode"] == "off"
    cluster.patch("Deployment", target, {"metadata": {"annotations": {"kvpilot.dev/kill": None}}})
    cluster.wait_for_document(target, mode="auto", kill=False)


def test_it_holds_while_the_target_scales_or_rolls_out(cluster, target):
    cluster.create_policy(target, mode="auto")
    cluster.wait_for_document(target, mode="auto", hold=None)
    cluster.patch("Deployment", target, {"spec": {"replicas": 3}})
    cluster.wait_for_condition(target, "Holding", "True", "NotReady")
    assert cluster.document(target)["hold"] == "2 of 3 pods are ready"
    cluster.run_pods(target, 3)
    cluster.wait_for_document(target, mode="auto", hold=None)
    cluster.wait_for_condition(target, "Holding", "False", "Steady")
    template = {"metadata": {"annotations": {"restarted": "now"}}}
    cluster.patch("Deployment", target, {"spec": {"template": template}})
    cluster.wait_for_condition(target, "Holding", "True", "Rollout")
    assert cluster.document(target)["hold"]
    cluster.wait_for_event(target, "Normal", "HoldingRollout")
    assert cluster.events(target).count(("Normal", "HoldingSteady")) == 1


def test_what_cannot_be_is_said_in_condition_and_event(cluster, target):
    cluster.create_policy(target, canary={"gates": [{**GATE, "metric": "latency"}]})
    cluster.wait_for_condition(target, "Accepted", "False", "InvalidSpec")
    assert "metric='latency'" in cluster.condition(target, "Accepted")["message"]
    cluster.wait_for_events(target, [("Warning", "AcceptedInvalidSpec")])
    assert cluster.document(target) is None
    cluster.patch("KVPolicy", target, {"spec": {"canary": {"gates": [GATE]}}})
    cluster.wait_for_condition(target, "Accepted", "True", "Valid")
    cluster.wait_for_document(target, mode="advisory")
    cluster.patch("KVPolicy", target, {"spec": {"policy": {"builtin": "wishful"}}})
    cluster.wait_for_condition(target, "PolicyReady", "False", "UnknownPolicy")
    cluster.wait_for_condition(target, "Holding", "True", "PolicyNotReady")
    assert "'wishful' is not one of" in cluster.document(target)["hold"]


def test_a_target_that_is_not_there(cluster, start_operator):
    name = cluster.new_name()
    start_operator()
    cluster.create_policy(name, mode="auto")
    cluster.wait_for_condition(name, "TargetFound", "False", "NotFound")
    assert cluster.wait_for_document(name, mode="auto")["hold"] == f"there is no Deployment {name}"
    cluster.deploy(name, 1)
    cluster.wait_for_document(name, mode="auto", hold=None)


def test_the_older_of_two_policies_has_the_target(cluster, target, helpers):
    cluster.create_policy(target, mode="off")
    cluster.wait_for_document(target, mode="off")
    second = {
        **cluster.get("KVPolicy", target),
        "metadata": {"name": f"{target}-second", "namespace": "kvpilot"},
    }
    second["spec"]["mode"] = "auto"
    created = helpers.wait_for_later_second(cluster.get("KVPolicy", target))
    assert created
    cluster.create(second)
    cluster.wait_for_condition(f"{target}-second", "Accepted", "False", "TargetConflict")
    assert cluster.document(target)["mode"] == "off"
    cluster.delete("KVPolicy", target)
    cluster.wait_for_condition(f"{target}-second", "Accepted", "True", "Valid")
    cluster.wait_for_document(target, mode="auto")


def test_an_exported_policy_must_be_there_unchanged_and_mounted(cluster, target):
    content = '{"kvpilot_policy": 1}\n'
    digest = hashlib.sha256(content.encode()).hexdigest()
    mounted, other = "kvpilot-policy", f"{target}-not-mounted"

    def name_policy(config_map: str, sha256: str) -> None:
        source = {"name": config_map, "key": "policy.json", "sha256": sha256}
        cluster.patch("KVPolicy", target, {"spec": {"policy": {"builtin": None, "configMap": source}}})

    cluster.create_policy(target, mode="auto", policy={"builtin": "threshold"})
    cluster.wait_for_document(target, policy={"name": "threshold"})
    name_policy(mounted, digest)
    cluster.wait_for_condition(target, "PolicyReady", "False", "NotFound")
    for name in (mounted, other):
        metadata = {"name": name, "namespace": "kvpilot"}
        cluster.create({"kind": "ConfigMap", "metadata": metadata, "data": {"policy.json": content}})
    cluster.wait_for_document(
        target, hold=None, policy={"file": "/etc/kvpilot/policy/policy.json", "sha256": digest}
    )
    name_policy(mounted, "0" * 64)
    cluster.wait_for_condition(target, "PolicyReady", "False", "HashMismatch")
    name_policy(other, digest)
    cluster.wait_for_condition(target, "PolicyReady", "False", "NotMounted")
    assert cluster.document(target)["hold"].startswith("the sidecar does not mount")


def test_a_foreign_edit_stays_until_it_is_removed_but_never_stands_in_the_way_of_the_switch(cluster, target):
    cluster.create_policy(target, mode="auto")
    cluster.wait_for_document(target, mode="auto")
    by_hand = "revision: 9000000000000\nmode: 'off'\n"
    cluster.patch("ConfigMap", f"{target}-control", {"data": {"control.yaml": by_hand}})
    cluster.wait_for_condition(target, "Distributed", "False", "ForeignEdit")
    cluster.patch("KVPolicy", target, {"spec": {"mode": "advisory"}})
    cluster.wait_for_generation(target, 2)
    assert cluster.document(target) == {"revision": 9000000000000, "mode": "off"}
    cluster.delete("ConfigMap", f"{target}-control")
    cluster.wait_for_document(target, mode="advisory")
    cluster.patch("ConfigMap", f"{target}-control", {"data": {"control.yaml": "mode: auto"}})
    cluster.wait_for_condition(target, "Distributed", "False", "ForeignEdit")
    cluster.patch("KVPolicy", target, {"spec": {"killSwitch": True}})
    cluster.wait_for_document(target, kill=True)


def test_it_says_whether_it_is_healthy(start_operator, helpers):
    (port,) = helpers.free_ports(1)
    start_operator("--health-port", str(port))

    def status(path: str) -> int | None:
        try:
            return httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False).status_code
        except httpx.ConnectError:
            return None

    helpers.wait_for(lambda: status("/healthz") == 200, "it is healthy")
    assert status("/metrics") == 404
