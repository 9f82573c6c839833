"""Spans as a collector receives them: a real OTLP/HTTP receiver in this process."""

import builtins
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import httpx
import pytest

from kvpilot.engine.errors import ConfigError
from kvpilot.engine.server.tracing import open_provider

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector(start_collector: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Receives what is sent to the endpoint that the environment names."""
    collector = start_collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    return collector


def attributes(span) -> dict[str, Any]:
    values = {}
    for attribute in span.attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        values[attribute.key] = [one.string_value for one in value.values] if kind == "array_value" else value
    return values


def complete(server, stub, headers=None, **fields):
    body = {"model": stub.MODEL, "prompt": [5] * 40, "max_tokens": 6, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, trust_env=False, timeout=20)


def test_a_request_is_a_span_with_its_phases(collector, run_server, stub):
    with run_server() as server:
        traceparent = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        assert complete(server, stub, traceparent).status_code == 200
        assert complete(server, stub).status_code == 200
    assert collector.services == {"kvpilot-engine"}
    roots = [span for span in collector.spans if span.name == "request"]
    assert len(roots) == 2
    root, second = roots
    assert root.trace_id.hex() == TRACE
    assert root.parent_span_id.hex() == PARENT
    assert second.trace_id.hex() != TRACE
    assert not second.parent_span_id
    phases = [span for span in collector.spans if span.parent_span_id == root.span_id]
    assert [span.name for span in phases] == ["queue", "prefill", "decode"]
    assert phases[0].start_time_unix_nano == root.start_time_unix_nano
    assert phases[2].end_time_unix_nano <= root.end_time_unix_nano
    for one, other in pairwise(phases):
        assert one.end_time_unix_nano == other.start_time_unix_nano
    told = attributes(root)
    assert told["gen_ai.request.model"] == stub.MODEL
    assert told["gen_ai.usage.input_tokens"] == 40
    assert told["gen_ai.usage.output_tokens"] == 6
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert told["kvpilot.cached_tokens"] == 0
    assert attributes(second)["kvpilot.cached_tokens"] > 0


def test_texts_are_not_in_spans(collector, run_server, stub):
    with run_server() as server:
        assert complete(server, stub, prompt="abc abc abc").status_code == 200
    assert "abc" not in str(collector.spans)


@pytest.mark.parametrize("header", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_malformed_context_is_no_parent(collector, run_server, stub, header):
    with run_server() as server:
        assert complete(server, stub, {"traceparent": header}).status_code == 200
    root = next(span for span in collector.spans if span.name == "request")
    assert not root.parent_span_id


def test_a_request_that_the_engine_failed_on_is_an_error(collector, run_server, stub):
    def fail(batch):
        raise RuntimeError("a step fails")

    with run_server() as server:
        server.runner.before_step = fail
        assert complete(server, stub).status_code == 500
    root = next(span for span in collector.spans if span.name == "request")
    assert root.status.code == 2


def test_a_collector_that_is_away_costs_no_request(monkeypatch, run_server, stub, free_port):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with run_server() as server:
        assert complete(server, stub).status_code == 200


def test_off_without_an_endpoint(run_server, stub):
    assert open_provider("x", {}) is None
    assert open_provider("x", {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}) is None
    code = """
import sys, kvpilot.engine.server.run
from kvpilot.agent.control.tracing import DecisionTracer
DecisionTracer().close()
print("opentelemetry.sdk" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, env={}, cwd="/")
    assert done.stdout == "False\n", done.stderr


def test_an_endpoint_without_the_sdk(monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("opentelemetry"):
            raise ImportError(name, name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"OTEL_EXPORTER_OTLP_ENDPOINT is set.*install kvpilot\[otel\]"):
        open_provider("x", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"})
