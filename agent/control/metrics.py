"""The sidecar's own metrics. `METRICS` names them all, without the prefix; `dashboards.names` says them again."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvpilot.agent.control.nouns import Decision, Inputs, Mode, Outcome
from kvpilot.agent.guard import GuardLimits, Memory, Reason
from kvpilot.agent.guard.review import is_open
from kvpilot.agent.guard.slo import pressure
from kvpilot.agent.policies.objective import window_objective
from kvpilot.engine.stats import Metric

PREFIX = "kvpilot_agent_"
DECISION_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

METRICS: dict[str, Metric] = {
    "decisions": Metric("counter", "Decisions by what became of them", ("outcome",)),
    "refusals": Metric("counter", "What the guard held or shrunk, by reason", ("reason",)),
    "reverts": Metric("counter", "Steps back to earlier knobs"),
    "errors": Metric("counter", "Failures of the world around the loop", ("kind",)),
    "proposed_knob": Metric("gauge", "What the policy wants, before the guard", ("name",)),
    "applied_knob": Metric("gauge", "Effective value of a knob, as read back", ("name",)),
    "objective": Metric(
        "gauge", "Goodput under the SLO and hits, minus quality loss: a window's live objective"
    ),
    "observed": Metric("gauge", "The last window, as measured", ("metric",)),
    "counterfactual": Metric(
        "gauge",
        "Traffic, recorded or estimated, under the proposed knobs, as simulated",
        ("traffic", "metric"),
    ),
    "counterfactual_baseline": Metric(
        "gauge",
        "Traffic, recorded or estimated, under the present knobs, as simulated",
        ("traffic", "metric"),
    ),
    "slo_pressure": Metric("gauge", "The worst of measured / limit: above 1 the SLO is violated"),
    "quality_loss": Metric("gauge", "Mean KL in nats per token over the pages that decode steps read"),
    "observation_age_seconds": Metric("gauge", "Age of the observation at the last decision"),
    "mode": Metric("gauge", "1 for the mode that is set", ("mode",)),
    "acts": Metric("gauge", "1 if decisions are written"),
    "safe_mode": Metric("gauge", "1 while safe mode is latched"),
    "breaker_open": Metric("gauge", "1 while the circuit breaker keeps the policy from being asked"),
    "frozen": Metric("gauge", "1 while somebody else's change keeps the loop from writing"),
    "policy_info": Metric("gauge", "1 for the policy that is asked", ("name", "hash")),
    "decision_seconds": Metric("histogram", "Duration of a tick", (), DECISION_BUCKETS),
}
ERRORS = {
    Reason.SOURCE: "source",
    Reason.UNREACHABLE: "engine",
    Reason.UNAUTHORIZED: "engine",
    Reason.INVALID: "engine",
    Reason.PARTIAL: "engine",
    Reason.AUDIT: "audit",
    Reason.POLICY: "policy",
    Reason.DEADLINE: "policy",
}
OBSERVED = {  # label -> signal
    "hit_rate": "hit_rate",
    "ttft_p99_seconds": "ttft_p99_seconds",
    "e2e_mean_seconds": "e2e_mean_seconds",
}


class AgentMetrics:
    """Told of every tick by the controller. `registry` belongs to the caller."""

    def __init__(self, registry: CollectorRegistry, limits: GuardLimits) -> None:
        self.limits = limits
        kinds = {"counter": Counter, "gauge": Gauge}
        self._by_name = {
            name: Histogram(PREFIX + name, metric.help, buckets=metric.buckets, registry=registry)
            if metric.kind == "histogram"
            else kinds[metric.kind](PREFIX + name, metric.help, metric.labels, registry=registry)
            for name, metric in METRICS.items()
        }
        for outcome in Outcome:
            self._counter("decisions", outcome.value, amount=0)
        for reason in Reason:
            self._counter("refusals", reason.value, amount=0)
        for kind in sorted(set(ERRORS.values())):
            self._counter("errors", kind, amount=0)

    def set_policy(self, name: str, digest: str) -> None:
        gauge = self._by_name["policy_info"]
        assert isinstance(gauge, Gauge)
        gauge.clear()
        gauge.labels(name, digest).set(1)

    def took(self, seconds: float) -> None:
        histogram = self._by_name["decision_seconds"]
        assert isinstance(histogram, Histogram)
        histogram.observe(seconds)

    def set_counterfactual(
        self, traffic: str, proposed: Mapping[str, float | None], present: Mapping[str, float | None]
    ) -> None:
        """`traffic` is recorded, or estimated: drawn from statistics."""
        for family, values in (("counterfactual", proposed), ("counterfactual_baseline", present)):
            for name, value in values.items():
                self._gauge(family, value, traffic, name)

    def __call__(self, decision: Decision, memory: Memory, inputs: Inputs | None) -> None:
        self._counter("decisions", decision.outcome.value)
        for refusal in decision.refusals:
            self._counter("refusals", refusal.reason.value)
            if refusal.reason in ERRORS:
                self._counter("errors", ERRORS[refusal.reason])
        if decision.outcome is Outcome.STEPPED_BACK:
            self._counter("reverts")
        for name, value in decision.knobs.items():
            self._gauge("applied_knob", value, name)
        self._gauge("safe_mode", bool(memory.safe_mode))
        if inputs is not None:
            self._note_inputs(decision, memory, inputs)

    def _note_inputs(self, decision: Decision, memory: Memory, inputs: Inputs) -> None:
        if decision.outcome is not Outcome.OBSERVED:
            for name, value in {**inputs.state.requested, **decision.wanted}.items():
                self._gauge("proposed_knob", value, name)
        for mode in Mode:
            self._gauge("mode", mode is inputs.control.mode, mode.value)
        self._gauge("acts", inputs.control.acts)
        self._gauge("breaker_open", is_open(memory, inputs.now))
        self._gauge("frozen", memory.frozen_until is not None and inputs.now < memory.frozen_until)
        if inputs.observation is None:
            return
        self._gauge("observation_age_seconds", inputs.age_seconds)
        self._gauge("slo_pressure", pressure(inputs.signals, self.limits.slo))
        self._gauge("quality_loss", inputs.signals.get("quality_loss"))
        for name, signal in OBSERVED.items():
            self._gauge("observed", inputs.signals.get(signal), name)
        value = window_objective(inputs.observation)
        self._gauge("objective", value)
        self._gauge("observed", value, "objective")

    def _counter(self, name: str, *labels: str, amount: float = 1) -> None:
        counter = self._by_name[name]
        assert isinstance(counter, Counter)
        (counter.labels(*labels) if labels else counter).inc(amount)

    def _gauge(self, name: str, value: object, *labels: str) -> None:
        """What was not measured is not shown as it was before: NaN."""
        gauge = self._by_name[name]
        assert isinstance(gauge, Gauge)
        number = value if isinstance(value, int | float) else float("nan")
        (gauge.labels(*labels) if labels else gauge).set(_small(number))


def _small(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # a policy may want any whole number
        return float("inf") if value > 0 else float("-inf")
