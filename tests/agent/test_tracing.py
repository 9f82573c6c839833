"""Spans of decisions, through the SDK and over a real OTLP/HTTP connection."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvpilot.agent.control_nouns import Decision, Outcome
from kvpilot.agent.guard import Reason, Refusal
from kvpilot.agent.tracing import DecisionTracer

service = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="needs kvpilot[otel]"
)

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
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list]:
    received: list = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = service.ExportTraceServiceRequest()
            request.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
            received.extend(
                s for part in request.resource_spans for scope in part.scope_spans for s in scope.spans
            )
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv(
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"http://127.0.0.1:{server.server_port}/v1/traces"
        )
        yield received
        server.shutdown()


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
