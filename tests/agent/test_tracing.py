"""Spans of decisions, as a collector receives them."""

from collections.abc import Callable
from typing import Any

import pytest

from kvpilot.agent.control.nouns import Decision, Outcome
from kvpilot.agent.control.tracing import DecisionTracer
from kvpilot.agent.guard import Reason, Refusal

APPLIED = Decision(
    time=1.0,
    outcome=Outcome.APPLIED,
    reason="pressure",
    wanted={"kv_level": 2, "max_batch": float("nan"), "ttl_seconds": "soon"},
    changes={"kv_level": 1},
    refusals=(Refusal(Reason.STEP, "kv_level", "2 is more than one step"),),
    knobs={"kv_level": 1, "ttl_seconds": 20.0},
    revision=7,
)


@pytest.fixture
def spans(start_collector: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    collector = start_collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{collector.url}/v1/traces")
    return collector.spans


def traced(*decisions: Decision) -> None:
    tracer = DecisionTracer()
    for decision in decisions:
        with tracer.decision_span() as describe:
            describe(decision)
    tracer.close()


def test_a_decision_is_a_span_with_its_refusals(spans):
    traced(APPLIED)
    (span,) = spans
    values = {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
    assert span.name == "decision"
    assert values["kvpilot.outcome"] == "applied"
    assert values["kvpilot.reason"] == "pressure"
    assert values["kvpilot.revision"] == 7
    assert values["kvpilot.changes.kv_level"] == 1
    assert values["kvpilot.wanted.kv_level"] == 2
    assert values["kvpilot.wanted.ttl_seconds"] == "'soon'"
    assert values["kvpilot.knobs.ttl_seconds"] == 20
    (event,) = span.events
    assert {a.key: a.value.string_value for a in event.attributes} == {
        "kvpilot.reason": "step",
        "kvpilot.knob": "kv_level",
        "kvpilot.detail": "2 is more than one step",
    }


def test_looks_between_decisions_and_failures_are_told_apart(spans):
    traced(Decision(time=1.0, outcome=Outcome.OBSERVED), Decision(time=2.0, outcome=Outcome.FAILED))
    assert [(span.name, span.status.code) for span in spans] == [("observation", 0), ("decision", 2)]


def test_a_tick_that_raises_ends_its_span(spans):
    tracer = DecisionTracer()
    with pytest.raises(ZeroDivisionError), tracer.decision_span():
        raise ZeroDivisionError
    tracer.close()
    assert spans[0].status.code == 2


def test_off_without_an_endpoint(monkeypatch):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    traced(APPLIED)
