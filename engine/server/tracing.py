"""OpenTelemetry spans of requests, sent by OTLP over HTTP when an endpoint is set. Imports the SDK only then.

The endpoint and everything else is OpenTelemetry's own environment: OTEL_EXPORTER_OTLP_ENDPOINT (or
..._TRACES_ENDPOINT), ..._HEADERS, OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER.
"""

import os
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from kvpilot.engine.errors import ConfigError
from kvpilot.engine.request import FinishReason, Request

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
NANOSECONDS = 1e9


def open_provider(service: str, environment: Mapping[str, str] = os.environ) -> "TracerProvider | None":
    """What makes and sends spans; None if no endpoint is set. ConfigError if the SDK is not installed.

    `shutdown()` sends what is left. A collector that does not answer costs spans, never requests.
    """
    endpoint = next((name for name in ENDPOINTS if environment.get(name)), None)
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(f"{endpoint} is set, but {error.name} is missing: install kvpilot[otel]") from error
    about = {
        "service.name": environment.get("OTEL_SERVICE_NAME", service),
        "service.version": version("kvpilot"),
    }
    provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


class RequestTracer:
    """A span per request, with its times in the queue, in prefill and in decode as children.

    They are made when the request has ended, from the times that the scheduler noted: nothing is added to a step.
    """

    def __init__(self, provider: "TracerProvider", *, model_name: str, clock: Callable[[], float]) -> None:
        """`clock` is the engine's, in seconds."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._provider = provider
        self._tracer = provider.get_tracer("kvpilot.engine")
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name
        self._clock = clock
        self._offset = time.time() - clock()

    def record(self, request: Request) -> None:
        """Called on the engine thread with each request that has ended, whatever the reason."""
        end = self._clock() if request.finish_time is None else request.finish_time
        parent = self._propagator.extract({"traceparent": request.traceparent or ""})
        root = self._tracer.start_span(
            "request",
            context=parent,
            kind=self._trace.SpanKind.SERVER,
            start_time=self._nanoseconds(request.arrival_time),
            attributes=self._attributes(request),
        )
        if request.finish_reason in (
            None,
            FinishReason.ERROR,
        ):  # None: a step failed, and it is not closed yet
            root.set_status(self._trace.StatusCode.ERROR, "the engine failed on this request")
        inside = self._trace.set_span_in_context(root)
        for name, start, stop in _phases(request, end):
            phase = self._tracer.start_span(name, context=inside, start_time=self._nanoseconds(start))
            phase.end(self._nanoseconds(stop))
        root.end(self._nanoseconds(end))

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()

    def _attributes(self, request: Request) -> dict[str, Any]:
        """Names of OpenTelemetry's conventions for generative AI where there are some."""
        reasons = [request.finish_reason.value] if request.finish_reason else []
        return {
            "gen_ai.request.model": self._model_name,
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.response.id": request.request_id,
            "gen_ai.response.finish_reasons": reasons,
            "gen_ai.usage.input_tokens": request.num_prompt_tokens,
            "gen_ai.usage.output_tokens": request.num_output_tokens,
            "kvpilot.cached_tokens": request.num_cached,
            "kvpilot.preemptions": request.num_preemptions,
        }

    def _nanoseconds(self, engine_seconds: float) -> int:
        return int((engine_seconds + self._offset) * NANOSECONDS)


def _phases(request: Request, end: float) -> list[tuple[str, float, float]]:
    """Those that it reached: one that ended in the queue has no prefill."""
    bounds = (
        request.arrival_time,
        request.first_admission_time,
        request.first_token_time,
        request.last_token_time,
    )
    reached = [bound for bound in bounds if bound is not None]
    names = ("queue", "prefill", "decode")[: len(reached)]
    return [
        (name, start, stop) for name, start, stop in zip(names, reached, [*reached[1:], end], strict=False)
    ]
