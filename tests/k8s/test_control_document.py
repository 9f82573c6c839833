"""The contract between operator and sidecar survives the way through YAML, and says what is wrong with a bad one."""

import json
from dataclasses import replace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot.k8s.control_document import (
    MODES,
    Bounds,
    ControlDocument,
    ControlDocumentError,
    Limits,
    PolicySource,
    Range,
    Slo,
    parse_control_document,
)

DIGEST = "ab" * 32


def maybe(low: int, high: int) -> st.SearchStrategy:
    return st.none() | st.integers(low, high)


@st.composite
def ranges(draw, low: int, high: int) -> Range:
    first, second = draw(maybe(low, high)), draw(maybe(low, high))
    if first is not None and second is not None:
        first, second = sorted((first, second))
    return Range(low=first, high=second)


documents = st.builds(
    ControlDocument,
    revision=st.integers(1, 2**53),
    mode=st.sampled_from(MODES),
    kill=st.booleans(),
    hold=st.none() | st.text(min_size=1),
    policy=st.just(PolicySource(name="threshold")) | st.just(PolicySource(file="/p/a.json", sha256=DIGEST)),
    slo=st.builds(Slo, ttft_p99_milliseconds=maybe(1, 3_600_000), violation_permille=maybe(0, 1000)),
    bounds=st.builds(Bounds, ttl_seconds=ranges(0, 86_400), size_factor_permille=ranges(0, 1000)),
    limits=st.builds(Limits, interval_seconds=maybe(1, 60), max_reverts_per_hour=maybe(0, 100)),
    canary_pods=st.lists(st.text(min_size=1)).map(tuple),
)


@settings(deadline=None)
@given(documents)
def test_what_is_written_is_read(document):
    assert parse_control_document(document.to_yaml()) == document


@settings(deadline=None)
@given(documents, st.integers(1, 2**53))
def test_the_digest_follows_the_content_but_not_the_revision(document, revision):
    assert replace(document, revision=revision).digest == document.digest
    assert replace(document, kill=not document.kill).digest != document.digest


def test_a_document_written_by_hand():
    document = parse_control_document(
        "revision: 7\nmode: off\nbounds: {max_batch: {high: 8}, size_factor_permille: {low: 100, high: 500}}\n"
    )
    assert document.mode == "off"  # YAML 1.1 calls it false
    knobs = document.bounds.by_knob()
    assert knobs["max_batch"] == (None, 8)
    assert knobs["size_factor"] == (0.1, 0.5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a list", "expected keys and values"),
        ("{", "is not YAML"),
        ("mode: auto", "revision=None is invalid"),
        ("revision: 0", "revision=0 is invalid"),
        ("revision: true", "revision=True is invalid"),
        ("{revision: 1, mode: on}", "mode=True is invalid: expected one of off, advisory, canary, auto"),
        ("{revision: 1, kill: 'yes'}", "kill='yes' is invalid"),
        ("{revision: 1, shema: 1}", "shema=1 is invalid: expected no such key"),
        ("{revision: 1, schema: 2}", "schema=2 is invalid"),
        ("{revision: 1, slo: {ttft_p99_milliseconds: 1.5}}", "slo.ttft_p99_milliseconds=1.5 is invalid"),
        ("{revision: 1, slo: {ttft: 1}}", "slo.ttft=1 is invalid"),
        ("{revision: 1, bounds: {kv_level: {low: 2, high: 1}}}", "bounds.kv_level.low=2 is invalid"),
        ("{revision: 1, bounds: {kv_level: 2}}", "bounds.kv_level=2 is invalid"),
        ("{revision: 1, bounds: {max_batch: {low: 0}}}", "bounds.max_batch.low=0 is invalid"),
        ("{revision: 1, limits: {interval_seconds: 0}}", "limits.interval_seconds=0 is invalid"),
        ("{revision: 1, policy: {}}", "policy=(None, None) is invalid"),
        ("{revision: 1, policy: {file: a, sha256: b}}", "policy.file='a' is invalid"),
        ("{revision: 1, policy: {file: /a}}", "policy.sha256=None is invalid"),
        ("{revision: 1, canary_pods: x}", "canary_pods='x' is invalid"),
    ],
)
def test_an_error_names_key_and_value(text, said):
    with pytest.raises(ControlDocumentError, match=r".") as caught:
        parse_control_document(text)
    assert said in str(caught.value)


def test_json_is_read_too():
    document = ControlDocument(
        revision=2, mode="canary", slo=Slo(ttft_p99_milliseconds=500), canary_pods=("a",)
    )
    assert parse_control_document(json.dumps(document.as_dict())) == document


def test_in_mode_canary_only_the_named_pods_act():
    document = ControlDocument(revision=1, mode="canary", canary_pods=("a",))
    assert [(document.role(pod), document.mode_of(pod)) for pod in ("a", "b", None)] == [
        ("canary", "auto"),
        ("baseline", "advisory"),
        ("baseline", "advisory"),
    ]
    assert replace(document, mode="auto").role("a") is None
    assert replace(document, mode="auto").mode_of("b") == "auto"


@pytest.mark.parametrize("mode", MODES)
def test_killed_is_off_in_every_mode(mode):
    assert ControlDocument(revision=1, mode=mode, kill=True, canary_pods=("a",)).mode_of("a") == "off"


def test_a_document_shows_only_what_is_set():
    assert yaml.safe_load(ControlDocument(revision=3).to_yaml()) == {
        "schema": 1,
        "revision": 3,
        "mode": "advisory",
        "kill": False,
    }
