"""OpenTelemetry spans of decisions; off unless an OTLP endpoint is set, as for the engine's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvpilot.agent.control.nouns import Decision, Outcome
from kvpilot.engine.server.tracing import open_provider

Describe = Callable[[Decision], None]


class DecisionTracer:
    """One span per tick, from the observation to the read-back. ConfigError if an endpoint is set without the SDK."""

    def __init__(self) -> None:
        self._provider = open_provider("kvpilot-agent")
        self._tracer = None if self._provider is None else self._provider.get_tracer("kvpilot.agent")

    @contextmanager
    def decision_span(self) -> Iterator[Describe]:
        """`with tracer.decision_span() as describe: describe(controller.tick())`."""
        if self._tracer is None:
            yield lambda decision: None
            return
        with self._tracer.start_as_current_span("decision") as span:
            yield lambda decision: _describe(span, decision)

    def close(self) -> None:
        """Sends what is left."""
        if self._provider is not None:
            self._provider.shutdown()


def _describe(span: Any, decision: Decision) -> None:
    from opentelemetry.trace import StatusCode

    if decision.outcome is Outcome.OBSERVED:
        span.update_name("observation")
    span.set_attribute("kvpilot.outcome", decision.outcome.value)
    span.set_attribute("kvpilot.reason", decision.reason)
    span.set_attribute("kvpilot.step_back", decision.is_step_back)
    if decision.revision is not None:
        span.set_attribute("kvpilot.revision", decision.revision)
    for kind, values in (
        ("wanted", decision.wanted),
        ("changes", decision.changes),
        ("knobs", decision.knobs),
    ):
        for name, value in values.items():
            span.set_attribute(
                f"kvpilot.{kind}.{name}", value if isinstance(value, int | float) else repr(value)
            )
    for refusal in decision.refusals:
        about = {"kvpilot.reason": refusal.reason.value, "kvpilot.detail": refusal.detail}
        span.add_event("refusal", {**about, "kvpilot.knob": refusal.knob or ""})
    if decision.outcome is Outcome.FAILED:
        span.set_status(StatusCode.ERROR, str(decision))
