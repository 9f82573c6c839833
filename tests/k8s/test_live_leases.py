"""Leader election between processes over a real API server: killed, paused, and never two."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e
DURATION = 3


@pytest.fixture
def candidates(cluster, tmp_path):
    """Three processes, each with the operator's rights; `leading` tells who says so, from their records."""
    lease = cluster.new_name()
    kubeconfig = cluster.server.kubeconfig(cluster.server.account_token("kvpilot-operator"))
    children = {}
    for name in ("a", "b", "c"):
        script = Path(__file__).parent / "lease_candidate.py"
        arguments = ["kvpilot", lease, name, str(DURATION), str(tmp_path / name)]
        with (tmp_path / f"{name}.log").open("w") as log:
            children[name] = subprocess.Popen(
                [sys.executable, "-P", str(script), *arguments],
                env={**os.environ, "KUBECONFIG": str(kubeconfig)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
    yield children
    for child in children.values():
        child.kill()
        child.wait()


def records(folder: Path) -> list[tuple[float, str]]:
    """Moments at which a process knew itself leading, in order of time, over all processes."""
    found = []
    for name in ("a", "b", "c"):
        path = folder / name
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        for line in lines:
            if line.endswith("\n"):
                record = json.loads(line)
                if record["leads"]:
                    found.append((record["time"], record["identity"]))
    return sorted(found)


def reigns(folder: Path) -> list[str]:
    """The identities in order, each run of the same one once: an overlap shows as more runs than changes."""
    order: list[str] = []
    for _, identity in records(folder):
        if not order or order[-1] != identity:
            order.append(identity)
    return order


def test_a_killed_leader_is_replaced_and_there_are_never_two(candidates, tmp_path, helpers):
    helpers.wait_for(lambda: len(records(tmp_path)) > 20, "someone leads")
    (first,) = reigns(tmp_path)
    candidates[first].kill()
    candidates[first].wait()
    helpers.wait_for(lambda: len(reigns(tmp_path)) == 2, "another one leads")
    second = reigns(tmp_path)[-1]
    count = len(records(tmp_path))
    helpers.wait_for(lambda: len(records(tmp_path)) > count + 20, "it goes on leading")
    assert reigns(tmp_path) == [first, second]


def test_a_leader_that_slept_finds_itself_replaced_and_does_not_act(candidates, tmp_path, helpers):
    helpers.wait_for(lambda: len(records(tmp_path)) > 20, "someone leads")
    (first,) = reigns(tmp_path)
    candidates[first].send_signal(signal.SIGSTOP)
    helpers.wait_for(lambda: len(reigns(tmp_path)) == 2, "another one leads")
    candidates[first].send_signal(signal.SIGCONT)
    second = reigns(tmp_path)[-1]
    count = len(records(tmp_path))
    helpers.wait_for(lambda: len(records(tmp_path)) > count + 60, "the new leader goes on")
    order = reigns(tmp_path)
    assert order == [first, second]


def test_a_killed_operator_is_replaced_by_another_one(cluster, start_operator, helpers):
    name = cluster.new_name()
    cluster.deploy(name, 2)
    operators = {f"operator-{number}": start_operator() for number in range(2)}
    cluster.create_policy(name, mode="auto")
    cluster.wait_for_document(name, mode="auto")
    lease = f"kvpilot-deployment-{name}"

    def holder() -> str:
        return cluster.get("Lease", lease)["spec"]["holderIdentity"].partition("_")[0]

    first = holder()
    operators[first].kill()
    operators[first].wait()
    cluster.patch("KVPolicy", name, {"spec": {"mode": "off"}})
    cluster.wait_for_document(name, mode="off")
    assert holder() != first
    assert cluster.get("Lease", lease)["spec"]["leaseTransitions"] == 1


def test_an_operator_that_ends_gives_its_leases_back(cluster, start_operator, helpers):
    name = cluster.new_name()
    operator = start_operator()
    cluster.create_policy(name)
    lease = f"kvpilot-deployment-{name}"
    helpers.wait_for(lambda: cluster.try_get("Lease", lease), "the Lease is taken")
    operator.send_signal(signal.SIGTERM)
    assert operator.wait(30) == 0
    assert not cluster.get("Lease", lease)["spec"].get("holderIdentity")
