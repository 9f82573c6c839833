"""What a workload and its pods are up to, read from dicts as the API returns them."""

import pytest

from kvpilot.k8s.workload import Pod, choose_canaries, mounted_at, selector_of, serving_pods, why_hold


def workload(*, wanted=3, generation=2, observed=2, replicas=3, updated=3, ready=3) -> dict:
    status = {"observedGeneration": observed, "replicas": replicas}
    status |= {"updatedReplicas": updated, "readyReplicas": ready}
    return {"metadata": {"generation": generation}, "spec": {"replicas": wanted}, "status": status}


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({}, None),
        ({"observed": 1}, "Rollout"),
        ({"updated": 2}, "Rollout"),
        ({"replicas": 4}, "Scaling"),
        ({"wanted": 5, "replicas": 3, "updated": 5}, "Scaling"),
        ({"ready": 2}, "NotReady"),
        ({"wanted": 0, "replicas": 0, "updated": 0, "ready": 0}, None),
    ],
)
def test_a_target_in_motion_is_held(state, reason):
    hold = why_hold(workload(**state))
    assert (hold.reason if hold else None) == reason


def test_a_workload_without_status_is_held():
    assert why_hold({"metadata": {"generation": 1}, "spec": {"replicas": 1}}) is not None


def pod(name: str, created: str = "2026-01-01T00:00:00Z", **changes) -> dict:
    return {
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "creationTimestamp": created,
            **changes.get("metadata", {}),
        },
        "spec": {"containers": [{"name": "engine", "ports": [{"name": "http", "containerPort": 9000}]}]},
        "status": {
            "podIP": changes.get("ip", "10.0.0.1"),
            "conditions": [{"type": "Ready", "status": changes.get("ready", "True")}],
            "containerStatuses": [{"restartCount": 2}],
        },
    }


def test_only_ready_pods_with_an_address_serve_and_the_oldest_comes_first():
    pods = serving_pods(
        [
            pod("young", "2026-01-02T00:00:00Z"),
            pod("old"),
            pod("starting", ready="False"),
            pod("nowhere", ip=None),
            pod("leaving", metadata={"deletionTimestamp": "2026-01-03T00:00:00Z"}),
        ]
    )
    assert [each.name for each in pods] == ["old", "young"]
    assert (pods[0].restarts, pods[0].metrics_url) == (2, "http://10.0.0.1:9000/metrics")


def test_an_ipv6_address_is_put_in_brackets():
    (found,) = serving_pods([pod("a", ip="fd00::1")])
    assert found.metrics_url == "http://[fd00::1]:9000/metrics"


def pods_named(names: str) -> list[Pod]:
    return [Pod(name, f"uid-{name}", 0, "", "") for name in names]


def test_canaries_are_the_oldest_and_stay_what_they_are():
    assert choose_canaries(pods_named("abcd"), 1, ()) == ("a",)
    assert choose_canaries(pods_named("abcd"), 1, ("c",)) == ("c",)
    assert choose_canaries(pods_named("abd"), 2, ("c", "d")) == ("a", "d")


@pytest.mark.parametrize("names", ["", "a", "ab"])
def test_a_baseline_always_remains(names):
    assert choose_canaries(pods_named(names), 2, ("a", "b")) == ()


def test_a_selector_becomes_a_query():
    expressions = [
        {"key": "tier", "operator": "In", "values": ["a", "b"]},
        {"key": "old", "operator": "DoesNotExist"},
        {"key": "gpu", "operator": "Exists"},
        {"key": "zone", "operator": "NotIn", "values": ["z"]},
    ]
    selector = {"matchLabels": {"app": "engine"}, "matchExpressions": expressions}
    query = selector_of({"spec": {"selector": selector}})
    assert query == "app=engine,tier in (a,b),!old,gpu,zone notin (z)"


def template(volume: dict, mount: dict, container: str = "autotune") -> dict:
    spec = {
        "volumes": [{"name": "policy", **volume}],
        "initContainers": [
            {"name": container, "volumeMounts": [{"name": "policy", "mountPath": "/p/", **mount}]}
        ],
    }
    return {"spec": {"template": {"spec": spec}}}


@pytest.mark.parametrize(
    ("workload", "path"),
    [
        (template({"configMap": {"name": "mine"}}, {}), "/p/policy.json"),
        (template({"configMap": {"name": "other"}}, {}), None),
        (template({"emptyDir": {}}, {}), None),
        (template({"configMap": {"name": "mine"}}, {"subPath": "x"}), None),
        (template({"configMap": {"name": "mine"}}, {}, container="engine"), None),
        (
            template({"configMap": {"name": "mine", "items": [{"key": "policy.json", "path": "a/b"}]}}, {}),
            "/p/a/b",
        ),
        (template({"configMap": {"name": "mine", "items": [{"key": "else", "path": "a"}]}}, {}), None),
    ],
)
def test_the_path_of_a_mounted_policy(workload, path):
    assert mounted_at(workload, "mine", "policy.json") == path
