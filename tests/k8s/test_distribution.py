"""Control documents in ConfigMaps: whose they are, and that their revision only ever rises."""

import base64
import hashlib

import pytest

from kvpilot.k8s.control_document import ControlDocument, parse_control_document
from kvpilot.k8s.distribution import (
    config_map_body,
    digest_of,
    is_foreign,
    next_revision,
    policy_problem,
    read_document,
)
from kvpilot.k8s.policy_resource import ConfigMapPolicy, parse_policy

RESOURCE = {
    "metadata": {
        "name": "p",
        "namespace": "n",
        "uid": "u",
        "generation": 1,
        "creationTimestamp": "2026-01-01T00:00:00Z",
    },
    "spec": {"target": {"kind": "Deployment", "name": "engine"}},
}
POLICY = parse_policy(RESOURCE)
DOCUMENT = ControlDocument(revision=5, mode="auto")


def written(document: ControlDocument = DOCUMENT) -> dict:
    body = config_map_body(POLICY, document, None)
    return {**body, "metadata": {**body["metadata"], "resourceVersion": "9"}}


def test_what_was_written_is_read_and_known_as_ones_own():
    current = written()
    assert read_document(current) == DOCUMENT
    assert not is_foreign(current)
    assert current["metadata"]["name"] == "engine-control"
    assert current["metadata"]["ownerReferences"][0]["uid"] == "u"
    assert config_map_body(POLICY, DOCUMENT, current)["metadata"]["resourceVersion"] == "9"


@pytest.mark.parametrize("text", ["revision: 5\nmode: advisory\n", "nonsense", ""])
def test_a_document_that_someone_else_wrote_is_foreign(text):
    current = written()
    current["data"]["control.yaml"] = text
    assert is_foreign(current)


def test_no_config_map_is_nobodys():
    assert not is_foreign(None)
    assert read_document(None) is None


def test_another_layout_of_the_same_content_is_not_a_foreign_edit():
    current = written()
    current["data"]["control.yaml"] = f"# a comment\n{current['data']['control.yaml']}"
    assert not is_foreign(current)


@pytest.mark.parametrize(
    ("status", "current", "now", "expected"),
    [
        ({}, None, 1.5, 1500),
        ({"revision": 2000}, None, 1.5, 2001),
        ({"revision": 10}, ControlDocument(revision=3000), 1.5, 3001),
        ({"revision": 10}, ControlDocument(revision=11), 1.5, 1500),
    ],
)
def test_the_revision_rises_above_all_that_is_known_and_with_time(status, current, now, expected):
    assert next_revision({**RESOURCE, "status": status}, current, now) == expected


def test_a_digest_of_text_and_of_binary_content():
    content = b"\x00\x01weights"
    digest = hashlib.sha256(content).hexdigest()
    assert digest_of({"binaryData": {"k": base64.b64encode(content).decode()}}, "k") == digest
    assert digest_of({"data": {"k": "text"}}, "k") == hashlib.sha256(b"text").hexdigest()
    assert digest_of({"data": {"k": "text"}}, "other") is None
    assert digest_of({}, "k") is None


def test_an_exported_policy_has_to_be_there_unchanged_and_readable_for_the_pods():
    digest = hashlib.sha256(b"text").hexdigest()
    there = {"data": {"k": "text"}}

    def reason(config_map, path, sha256=digest) -> str | None:
        problem = policy_problem(ConfigMapPolicy(name="m", key="k", sha256=sha256), config_map, path)
        return problem[0] if problem else None

    assert reason(there, "/p/k") is None
    assert reason(None, "/p/k") == "NotFound"
    assert reason({"data": {}}, "/p/k") == "NotFound"
    assert reason(there, "/p/k", "0" * 64) == "HashMismatch"
    assert reason(there, None) == "NotMounted"


def test_the_document_in_the_config_map_is_the_contract():
    assert parse_control_document(written()["data"]["control.yaml"]).mode_of("any") == "auto"
