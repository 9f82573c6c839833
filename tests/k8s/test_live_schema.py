"""What a real API server says to the manifests and to good and bad KVPolicies."""

import copy

import pytest

pytestmark = pytest.mark.e2e
GATE = {"metric": "time_to_first_token_seconds", "statistic": "p99"}
POLICY_MAP = {"name": "m", "key": "policy.json", "sha256": "0" * 64}
DURATION = {"type": "string", "pattern": "^[0-9]+(ms|s|m|h|d)$"}
WORDS = {"type": "object", "additionalProperties": {"type": "string"}}
OTHERS = {  # the Prometheus operator's resources: the fields that the manifests use, and nothing else
    "PodMonitor": {
        "type": "object",
        "required": ["selector", "podMetricsEndpoints"],
        "properties": {
            "selector": {"type": "object", "properties": {"matchLabels": WORDS}},
            "podMetricsEndpoints": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "port": {"type": "string"},
                        "path": {"type": "string"},
                        "interval": DURATION,
                    },
                },
            },
        },
    },
    "PrometheusRule": {
        "type": "object",
        "required": ["groups"],
        "properties": {
            "groups": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["name", "rules"],
                    "properties": {
                        "name": {"type": "string", "minLength": 1},
                        "rules": {
                            "type": "array",
                            "items": {
                                "type": "object",
                                "required": ["expr"],
                                "properties": {
                                    "record": {"type": "string"},
                                    "alert": {"type": "string"},
                                    "expr": {"type": "string"},
                                    "for": DURATION,
                                    "labels": WORDS,
                                    "annotations": WORDS,
                                },
                            },
                        },
                    },
                },
            },
        },
    },
}


@pytest.fixture(scope="module")
def prometheus_operator(cluster, helpers):
    """The API server serves its resources, as where it is installed."""
    for kind, fields in OTHERS.items():
        names = {
            "kind": kind,
            "listKind": f"{kind}List",
            "plural": f"{kind.lower()}s",
            "singular": kind.lower(),
        }
        schema = {"type": "object", "properties": {"spec": fields}}
        version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
        approved = {"api-approved.kubernetes.io": "unapproved, for tests"}
        name = f"{names['plural']}.monitoring.coreos.com"
        cluster.create(
            {
                "apiVersion": "apiextensions.k8s.io/v1",
                "kind": "CustomResourceDefinition",
                "metadata": {"name": name, "annotations": approved},
                "spec": {
                    "group": "monitoring.coreos.com",
                    "scope": "Namespaced",
                    "names": names,
                    "versions": [version],
                },
            }
        )
        helpers.wait_for(lambda kind=kind: cluster.try_get(kind) is not None, f"{kind}s can be listed")


@pytest.mark.parametrize("overlay", ["advisory", "canary", "auto"])
def test_every_manifest_passes_a_server_side_dry_run(cluster, render, helpers, prometheus_operator, overlay):
    from kubernetes.client.exceptions import ApiException

    resources = render(overlay)
    kinds = [resource["kind"] for resource in resources]
    assert len(kinds) == 22
    for resource in resources:
        body, kind, name = copy.deepcopy(resource), resource["kind"], resource["metadata"]["name"]
        if kind == "PodDisruptionBudget":
            body["apiVersion"] = "policy/v1beta1"  # 1.20 has no younger one; the fields are the same
        exists = cluster.try_get(kind, name)
        method, path = "POST", helpers.path_of(kind)
        if exists is not None:
            method, path = "PUT", helpers.path_of(kind, name)
            body["metadata"]["resourceVersion"] = exists["metadata"]["resourceVersion"]
        try:
            answer = cluster.server.call(method, path, body, query=[("dryRun", "All")])
        except ApiException as error:
            pytest.fail(f"{overlay}: {kind} {name}: {error.body}")
        assert answer["kind"] == kind
        assert (cluster.try_get(kind, name) is None) == (exists is None)  # a dry run leaves nothing behind


def spec(**fields) -> dict:
    return {"target": {"kind": "Deployment", "name": "engine"}, **fields}


@pytest.mark.parametrize(
    "good",
    [
        {"target": {"name": "engine"}},
        spec(mode="off", killSwitch=True),
        spec(mode="canary", canary={"replicas": 2, "promote": True, "gates": [GATE]}),
        spec(policy={"builtin": "threshold"}),
        spec(policy={"configMap": POLICY_MAP}),
        spec(slo={"ttftP99Milliseconds": 1, "violationPermille": 1000, "qualityLossMicronats": 0}),
        spec(bounds={"ttlSeconds": {"low": 0, "high": 86400}, "kvLevel": {"high": 2}}),
        spec(limits={"intervalSeconds": 15, "decisionSeconds": 60, "maxRevertsPerHour": 0}),
    ],
)
def test_a_good_specification_is_accepted(cluster, good):
    created = dry_run(cluster, good)
    assert created["spec"].items() >= {"mode": good.get("mode", "advisory")}.items()
    assert {**created["spec"], **good}.keys() == created["spec"].keys()


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({}, "spec.target"),
        ({"target": {}}, "spec.target.name"),
        ({"target": {"kind": "DaemonSet", "name": "a"}}, "spec.target.kind"),
        (spec(mode="on"), "spec.mode"),
        (spec(mode=False), "spec.mode"),
        (spec(killSwitch="yes"), "spec.killSwitch"),
        (spec(policy={}), "spec.policy"),
        (spec(policy={"builtin": "a", "configMap": POLICY_MAP}), "spec.policy"),
        (spec(policy={"configMap": {"name": "m", "key": "k"}}), "spec.policy.configMap.sha256"),
        (spec(policy={"configMap": {**POLICY_MAP, "sha256": "0" * 63}}), "spec.policy.configMap.sha256"),
        (spec(slo={"ttftP99Milliseconds": 0.5}), "spec.slo.ttftP99Milliseconds"),
        (spec(slo={"ttftP99Milliseconds": 0}), "spec.slo.ttftP99Milliseconds"),
        (spec(slo={"violationPermille": 1001}), "spec.slo.violationPermille"),
        (spec(bounds={"sizeFactorPermille": {"high": 0.5}}), "spec.bounds.sizeFactorPermille.high"),
        (spec(bounds={"sizeFactorPermille": {"high": 1001}}), "spec.bounds.sizeFactorPermille.high"),
        (spec(bounds={"maxBatch": {"low": 0}}), "spec.bounds.maxBatch.low"),
        (spec(bounds={"ttlSeconds": 60}), "spec.bounds.ttlSeconds"),
        (spec(limits={"intervalSeconds": "15s"}), "spec.limits.intervalSeconds"),
        (spec(canary={"replicas": 0}), "spec.canary.replicas"),
        (spec(canary={"gates": []}), "spec.canary.gates"),
        (spec(canary={"gates": [{**GATE, "statistic": "mean"}]}), "spec.canary.gates.statistic"),
        (spec(canary={"gates": [{"metric": "a"}]}), "spec.canary.gates.statistic"),
        (spec(canary={"gates": [{**GATE, "maxRatioPermille": 1.1}]}), "spec.canary.gates.maxRatioPermille"),
    ],
)
def test_a_bad_specification_is_refused_by_the_server(cluster, bad, field):
    from kubernetes.client.exceptions import ApiException

    with pytest.raises(ApiException) as refused:
        dry_run(cluster, bad)
    assert refused.value.status == 422
    assert field in str(refused.value.body)


def dry_run(cluster, spec: dict) -> dict:
    resource = {
        "apiVersion": "kvpilot.dev/v1alpha1",
        "kind": "KVPolicy",
        "metadata": {"name": "tried", "namespace": "kvpilot"},
        "spec": spec,
    }
    return cluster.create(resource, query=[("dryRun", "All")])


def test_the_status_is_a_subresource_and_the_specification_counts_generations(cluster):
    name = cluster.new_name()
    cluster.create_policy(name)
    cluster.patch("KVPolicy", name, {"status": {"revision": 5}})
    assert "status" not in cluster.get("KVPolicy", name)
    cluster.patch("KVPolicy", name, {"status": {"revision": 5}}, status=True)
    found = cluster.get("KVPolicy", name)
    assert (found["status"]["revision"], found["metadata"]["generation"]) == (5, 1)
    cluster.patch("KVPolicy", name, {"spec": {"mode": "off"}})
    assert cluster.get("KVPolicy", name)["metadata"]["generation"] == 2


def test_the_status_knows_neither_phases_nor_floats(cluster):
    (crd,) = [each for each in cluster.resources if each["kind"] == "CustomResourceDefinition"]
    (version,) = crd["spec"]["versions"]

    def fields(schema: dict, path: str = ""):
        yield path, schema.get("type")
        for name, inner in schema.get("properties", {}).items():
            yield from fields(inner, f"{path}.{name}")
        if "items" in schema:
            yield from fields(schema["items"], f"{path}[]")

    found = dict(fields(version["schema"]["openAPIV3Schema"]))
    assert len(found) > 70
    assert "number" not in found.values()
    assert not [path for path in found if "phase" in path.lower()]
