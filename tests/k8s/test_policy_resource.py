"""A KVPolicy as the API returns it, and what is wrong with a bad one."""

import pytest

from kvpilot.k8s.gates import DEFAULT_GATES
from kvpilot.k8s.policy_resource import KILL_ANNOTATION, SpecError, parse_policy, snake_case

DIGEST = "cd" * 32


def resource(annotations: dict | None = None, **spec) -> dict:
    return {
        "metadata": {
            "name": "p",
            "namespace": "n",
            "uid": "u",
            "generation": 4,
            "creationTimestamp": "2026-01-01T00:00:00Z",
            **({"annotations": annotations} if annotations else {}),
        },
        "spec": {"target": {"kind": "Deployment", "name": "engine"}, **spec},
    }


def test_what_is_left_out_has_a_careful_default():
    policy = parse_policy(resource())
    assert (policy.mode, policy.kill, policy.builtin, policy.config_map) == (
        "advisory",
        False,
        "threshold",
        None,
    )
    assert policy.canary.gates == DEFAULT_GATES
    assert not policy.canary.promote
    assert policy.target.control_map == "engine-control"
    assert policy.generation == 4


def test_everything_that_can_be_said():
    policy = parse_policy(
        resource(
            mode="canary",
            policy={"configMap": {"name": "m", "key": "policy.json", "sha256": DIGEST}},
            slo={"ttftP99Milliseconds": 900, "interTokenP99Milliseconds": 80, "qualityLossMicronats": 4000},
            bounds={"sizeFactorPermille": {"low": 0, "high": 500}, "kvLevel": {"high": 1}},
            limits={"intervalSeconds": 15, "maxRevertsPerHour": 2},
            canary={
                "replicas": 2,
                "observeSeconds": 30,
                "gates": [{"metric": "e2e_request_seconds", "statistic": "p95", "maxRatioPermille": 1200}],
            },
        )
    )
    assert policy.config_map is not None
    assert policy.config_map.sha256 == DIGEST
    assert policy.slo.ttft_p99_milliseconds == 900
    assert policy.slo.inter_token_p99_milliseconds == 80
    assert policy.bounds.by_knob()["size_factor"] == (0.0, 0.5)
    assert policy.limits.max_reverts_per_hour == 2
    assert (policy.canary.replicas, policy.canary.gates[0].max_ratio_permille) == (2, 1200)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"target": {"name": ""}}, "spec.target.name=''"),
        ({"target": {"kind": "Pod", "name": "a"}}, "spec.target.kind='Pod'"),
        ({"mode": "on"}, "spec.mode='on'"),
        ({"mode": False}, "spec.mode=False"),
        ({"policy": {}}, "spec.policy={} is invalid"),
        ({"policy": {"builtin": "a", "configMap": {}}}, "expected one of builtin and configMap"),
        ({"policy": {"configMap": {"name": "m"}}}, "spec.policy.configMap is incomplete"),
        ({"slo": {"ttftP99Milliseconds": 0}}, r"spec.slo.ttft_p99_milliseconds=0 is invalid"),
        ({"slo": {"ttftP99Milliseconds": 1.5}}, r"spec.slo.ttft_p99_milliseconds=1.5 is invalid"),
        ({"slo": {"ttft": 1}}, "spec.slo.ttft is unknown"),
        ({"bounds": {"maxBatch": {"low": 9, "high": 3}}}, "spec.bounds.max_batch.low=9 is invalid"),
        ({"canary": {"gates": []}}, "at least one gate"),
        ({"canary": {"gates": [{"metric": "a", "statistic": "p99"}]}}, "spec.gates.metric='a' is invalid"),
        ({"canary": {"observeSeconds": 100, "timeoutSeconds": 120}}, "at least warmupSeconds"),
    ],
)
def test_a_bad_specification_is_refused_with_field_and_value(spec, said):
    with pytest.raises(SpecError, match=said):
        parse_policy(resource(**spec))


@pytest.mark.parametrize(
    ("value", "kills"), [("true", True), ("yes", True), ("", True), ("false", False), (" False ", False)]
)
def test_the_kill_annotation_works_whatever_is_typed(value, kills):
    assert parse_policy(resource({KILL_ANNOTATION: value})).kill is kills


def test_the_kill_switch_in_the_specification():
    assert parse_policy(resource(killSwitch=True)).kill


def test_names_follow_the_contract():
    assert snake_case("ttftP99Milliseconds") == "ttft_p99_milliseconds"
    assert snake_case("sizeFactorPermille") == "size_factor_permille"
