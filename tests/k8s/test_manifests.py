"""The rendered overlays, without a cluster: valid for every supported Kubernetes, hardened, and consistent."""

from pathlib import Path
from typing import Any

import pytest

OVERLAYS = ("advisory", "canary", "auto")
VERSIONS = tuple(f"1.{minor}" for minor in range(29, 38))
OTHERS_KINDS = {"KVPolicy", "PodMonitor", "PrometheusRule"}  # checked by test_live_schema.py, and below


@pytest.fixture(scope="module", params=OVERLAYS)
def resources(request, render) -> list[dict[str, Any]]:
    return render(request.param)


def find(resources: list[dict[str, Any]], kind: str, name: str = "kvpilot-engine") -> dict[str, Any]:
    (found,) = [each for each in resources if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def pod_of(resources: list[dict[str, Any]], name: str = "kvpilot-engine") -> dict[str, Any]:
    return find(resources, "Deployment", name)["spec"]["template"]["spec"]


def container(resources: list[dict[str, Any]], name: str) -> dict[str, Any]:
    pod = pod_of(resources)
    (found,) = [each for each in (*pod["initContainers"], *pod["containers"]) if each["name"] == name]
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_all_resources_are_valid_and_known(resources, version):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    unknown = set()
    for resource in resources:
        try:
            kubernetes_validate.validate(resource, version, strict=True)
        except kubernetes_validate.SchemaNotFoundError:
            unknown.add(resource["kind"])
    assert unknown == OTHERS_KINDS


def test_strict_validation_would_find_a_misspelt_field(render):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    deployment = find(render("advisory"), "Deployment")
    deployment["spec"]["template"]["spec"]["initContainers"][0]["restartPolicies"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, VERSIONS[0], strict=True)


def test_modes_of_the_overlays(render):
    modes = [find(render(overlay), "KVPolicy")["spec"]["mode"] for overlay in OVERLAYS]
    assert modes == ["advisory", "canary", "auto"]


def test_the_policies_of_the_overlays_are_ones_that_the_operator_understands(resources):
    from kvpilot.k8s.policy_resource import parse_policy

    policy = find(resources, "KVPolicy")
    policy["metadata"] |= {"uid": "u", "generation": 1, "creationTimestamp": "2026-01-01T00:00:00Z"}
    parsed = parse_policy(policy)
    deployment = find(resources, parsed.target.kind, parsed.target.name)
    if parsed.mode == "canary":
        assert deployment["spec"]["replicas"] > parsed.canary.replicas


def test_the_sidecar_is_native_small_and_not_asked_for_readiness(resources):
    sidecar = container(resources, "autotune")
    assert sidecar in pod_of(resources)["initContainers"]
    assert sidecar["restartPolicy"] == "Always"
    assert not {"readinessProbe", "startupProbe"} & set(sidecar)
    assert sidecar["resources"]["requests"] == {"cpu": "50m", "memory": "150Mi"}
    assert sidecar["resources"]["limits"]["memory"] == "150Mi"


@pytest.mark.parametrize("workload", ["kvpilot-engine", "kvpilot-operator"])
def test_every_container_is_locked_down(resources, workload):
    pod = pod_of(resources, workload)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    for each in (*pod.get("initContainers", []), *pod["containers"]):
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"requests", "limits"} <= set(each["resources"])
    assert not [volume for volume in pod.get("volumes", []) if "hostPath" in volume]


def test_only_the_sidecar_gets_a_token_of_the_cluster(resources):
    pod = pod_of(resources)
    assert pod["automountServiceAccountToken"] is False
    tokens = {v["name"] for v in pod["volumes"] if "serviceAccountToken" in str(v.get("projected", ""))}
    holders = [
        each["name"]
        for each in (*pod["initContainers"], *pod["containers"])
        if tokens & {mount["name"] for mount in each.get("volumeMounts", [])}
    ]
    assert holders == ["autotune"]


def test_the_admin_token_stays_in_memory_and_its_port_inside_the_pod(resources):
    pod = pod_of(resources)
    (volume,) = [each for each in pod["volumes"] if each["name"] == "admin-token"]
    assert volume["emptyDir"]["medium"] == "Memory"
    ports = {port["containerPort"] for each in pod["containers"] for port in each.get("ports", [])}
    assert "--admin-port=8001" in container(resources, "engine")["args"]
    assert 8001 not in ports
    assert [port["targetPort"] for port in find(resources, "Service")["spec"]["ports"]] == ["http"]


def test_what_is_mounted_and_referred_to_is_there(resources):
    pod = pod_of(resources)
    volumes = {volume["name"] for volume in pod["volumes"]}
    for each in (*pod["initContainers"], *pod["containers"]):
        assert {mount["name"] for mount in each.get("volumeMounts", [])} <= volumes
    settings = find(resources, "ConfigMap", "kvpilot-engine-settings")["data"]
    used = [
        e["valueFrom"] for e in container(resources, "engine")["env"] if "configMapKeyRef" in e["valueFrom"]
    ]
    assert {each["configMapKeyRef"]["key"] for each in used} == set(settings)
    assert {each["configMapKeyRef"]["name"] for each in used} == {"kvpilot-engine-settings"}
    find(resources, "ServiceAccount", pod["serviceAccountName"])
    control = f"{find(resources, 'Deployment')['metadata']['name']}-control"
    assert {"name": "KVPILOT_CONTROL_CONFIG_MAP", "value": control} in container(resources, "autotune")["env"]
    assert find(resources, "Role")["rules"][0]["resourceNames"] == [control]


def parse_command(arguments: list[str]) -> None:
    """Raises if `autotune` does not know the command or an option of it."""
    import typer.core
    import typer.main

    from kvpilot.agent.cli import app

    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    name, *rest = arguments
    group.commands[name].make_context(name, rest)


def test_an_option_that_is_not_there_would_be_found():
    with pytest.raises(Exception, match="--no-such-option"):
        parse_command(["run", "--no-such-option"])


def test_the_command_lines_are_ones_that_autotune_understands(resources, monkeypatch):
    monkeypatch.setenv("POD_NAMESPACE", "kvpilot")
    values = {"$(MODEL)": "smollm2", "$(POOL_MB)": "512", "$(MAX_BATCH_CEILING)": "64"}
    for arguments in (
        container(resources, "engine")["args"],
        container(resources, "autotune")["args"],
        pod_of(resources, "kvpilot-operator")["containers"][0]["args"],
    ):
        filled = list(arguments)
        for name, value in values.items():
            filled = [argument.replace(name, value) for argument in filled]
        assert "$(" not in " ".join(filled)
        parse_command(filled)


def test_the_sidecars_environment_is_one_that_it_understands(resources, monkeypatch):
    from kvpilot.agent.control.config import load_settings

    for entry in container(resources, "autotune")["env"]:
        monkeypatch.setenv(entry["name"], entry.get("value", "some-pod"))
    settings = load_settings({})
    assert settings.control_config_map == "kvpilot-engine-control"
    assert settings.pod_name == "some-pod"
    assert str(settings.control_file) == "/etc/kvpilot/control/control.yaml"


def test_monitors_and_network_policies_name_ports_that_exist(resources):
    pod, operator = pod_of(resources), pod_of(resources, "kvpilot-operator")
    containers = (*pod["initContainers"], *pod["containers"], *operator["containers"])
    names = {port["name"] for each in containers for port in each.get("ports", [])}
    monitor = find(resources, "PodMonitor")
    labels = find(resources, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert {each["port"] for each in monitor["spec"]["podMetricsEndpoints"]} == {"http", "metrics"}
    used = {each["port"] for each in monitor["spec"]["podMetricsEndpoints"]}
    for policy in (each for each in resources if each["kind"] == "NetworkPolicy"):
        rules = (*policy["spec"]["ingress"], *policy["spec"]["egress"])
        used |= {p["port"] for rule in rules for p in rule["ports"] if isinstance(p["port"], str)}
    assert used <= names


def test_the_rules_are_those_of_the_dashboards(resources):
    from kvpilot.dashboards.rules import rule_document

    assert find(resources, "PrometheusRule", "kvpilot")["spec"] == rule_document()


def test_rules_of_the_schema_say_what_the_operator_says(resources):
    celpy = pytest.importorskip("celpy")
    schema = find(resources, "CustomResourceDefinition", "kvpolicies.kvpilot.dev")["spec"]["versions"][0][
        "schema"
    ]
    bounds = schema["openAPIV3Schema"]["properties"]["spec"]["properties"]["bounds"]["properties"]
    assert set(bounds) == {"ttlSeconds", "sizeFactorPermille", "maxBatch", "kvLevel"}
    for knob in bounds.values():
        (rule,) = knob["x-kubernetes-validations"]
        environment = celpy.Environment()
        program = environment.program(environment.compile(rule["rule"]))
        verdicts = [
            bool(program.evaluate({"self": celpy.json_to_cel(value)}))
            for value in ({}, {"low": 1}, {"high": 1}, {"low": 1, "high": 1}, {"low": 2, "high": 1})
        ]
        assert verdicts == [True, True, True, True, False]


def test_no_manifest_is_left_out(render, helpers):
    rendered = {(each["kind"], each["metadata"]["name"]) for overlay in OVERLAYS for each in render(overlay)}
    import yaml

    for path in Path(helpers.manifests).rglob("*.yaml"):
        for document in yaml.safe_load_all(path.read_text()):
            if document["apiVersion"].startswith("kustomize.config.k8s.io"):
                continue
            assert (document["kind"], document["metadata"]["name"]) in rendered, path
