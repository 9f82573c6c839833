"""The kill switches of a cluster, thrown at a real loop beside a real engine: the KVPolicy and the annotation by way of
the operator, and the ConfigMap by hand, without one."""

import shutil
from contextlib import suppress

import pytest
import yaml

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]
NAME = "kvpilot-engine"
CONFIG_MAP = f"{NAME}-control"
KILLED = {"killed": "the control document says kill"}


@pytest.fixture(scope="module")
def workload(cluster, helpers):
    """A steady Deployment of two pods, by the name of which the sidecar's Role speaks."""
    cluster.deploy(NAME, 2)
    yield
    foreground = {"propagationPolicy": "Foreground"}
    cluster.server.call("DELETE", helpers.path_of("Deployment", NAME), foreground)
    helpers.wait_for(lambda: not cluster.try_get("Deployment", NAME), "the Deployment is gone")


@pytest.fixture
def start_loop(rehearsal, cluster, tmp_path):
    """`autotune run` as it is started in a pod: the token of its service account, and a watch on its ConfigMap."""
    account = tmp_path / "account"
    account.mkdir()
    (account / "token").write_text(cluster.server.account_token(NAME))
    shutil.copy(cluster.server.ca_file, account / "ca.crt")
    host, port = cluster.server.url.removeprefix("https://").split(":")
    environment = {
        "KUBERNETES_SERVICE_HOST": host,
        "KUBERNETES_SERVICE_PORT": port,
        "POD_NAMESPACE": "kvpilot",
        "KVPILOT_CONTROL_ACCOUNT": str(account),
        "KVPILOT_CONTROL_CONFIG_MAP": CONFIG_MAP,
        "KVPILOT_POD_NAME": "a-pod",
    }
    yield lambda: rehearsal.loop(environment=environment)
    from kubernetes.client.exceptions import NotFoundException

    cluster.stop_operators()
    for kind, name in (("KVPolicy", NAME), ("ConfigMap", CONFIG_MAP)):
        with suppress(NotFoundException):  # the ConfigMap goes with its KVPolicy
            cluster.delete(kind, name)


@pytest.mark.parametrize(
    ("label", "kind", "switch", "back", "expected"),
    [
        (
            "`killSwitch: true` in the KVPolicy",
            "KVPolicy",
            {"spec": {"killSwitch": True}},
            {"spec": {"killSwitch": False}},
            KILLED,
        ),
        (
            '`mode: "off"` in the KVPolicy',
            "KVPolicy",
            {"spec": {"mode": "off"}},
            {"spec": {"mode": "auto"}},
            {"mode": "off", "killed": ""},
        ),
        (
            "annotation `kvpilot.dev/kill` of the Deployment",
            "Deployment",
            {"metadata": {"annotations": {"kvpilot.dev/kill": "true"}}},
            {"metadata": {"annotations": {"kvpilot.dev/kill": None}}},
            KILLED,
        ),
    ],
)
def test_by_way_of_the_operator(
    rehearsal, cluster, workload, start_operator, start_loop, label, kind, switch, back, expected
):
    start_operator()
    cluster.create_policy(NAME, mode="auto", policy={"builtin": "random"})
    cluster.wait_for_document(NAME, mode="auto")
    with start_loop() as loop:
        line, seconds, late = rehearsal.throw(loop, lambda: cluster.patch(kind, NAME, switch))
        assert {name: line[name] for name in expected} == expected
        assert not line["acts"]
        rehearsal.release(loop, lambda: cluster.patch(kind, NAME, back))
    rehearsal.row(label, line, seconds, late)


def test_the_config_map_by_hand_without_an_operator(rehearsal, cluster, start_loop):
    def content(revision: int, **more: object) -> dict:
        document = {"revision": revision, "mode": "auto", "policy": {"name": "random"}, **more}
        return {"data": {"control.yaml": yaml.safe_dump(document)}}

    meta = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": CONFIG_MAP, "namespace": "kvpilot"}}
    cluster.create({**meta, **content(1)})
    with start_loop() as loop:
        switch = content(2, kill=True)
        line, seconds, late = rehearsal.throw(loop, lambda: cluster.patch("ConfigMap", CONFIG_MAP, switch))
        assert {name: line[name] for name in KILLED} == KILLED
        rehearsal.release(loop, lambda: cluster.patch("ConfigMap", CONFIG_MAP, content(3)))
    rehearsal.row("`kill: true` in the ConfigMap, by hand", line, seconds, late)
