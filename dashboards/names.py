"""The metrics that dashboards and rules speak of, checked against what is exported."""

from kvpilot.engine.stats import METRICS
from kvpilot.exporter.collector import PREFIX, TIME_METRIC

AGENT_PREFIX = "kvpilot_agent_"
# The sidecar's, by kind, without prefix. A test holds them equal to what it exports.
AGENT_METRICS: dict[str, str] = {
    "decisions": "counter",
    "refusals": "counter",
    "reverts": "counter",
    "errors": "counter",
    "decision_seconds": "histogram",
    "proposed_knob": "gauge",
    "applied_knob": "gauge",
    "objective": "gauge",
    "mode": "gauge",
    "policy_info": "gauge",
    "counterfactual": "gauge",
    "counterfactual_baseline": "gauge",
    "observed": "gauge",
    "slo_pressure": "gauge",
    "acts": "gauge",
    "frozen": "gauge",
    "safe_mode": "gauge",
    "breaker_open": "gauge",
    "observation_age_seconds": "gauge",
    "quality_loss": "gauge",
}
SUFFIXES = {"gauge": "", "counter": "_total", "histogram": "_bucket"}


def engine(name: str) -> str:
    """The series of an engine metric: counters with _total, histograms with _bucket."""
    if name == TIME_METRIC or name == "engine_info":
        return PREFIX + name
    return PREFIX + name + SUFFIXES[METRICS[name].kind]


def agent(name: str) -> str:
    """The same of a sidecar's metric."""
    return AGENT_PREFIX + name + SUFFIXES[AGENT_METRICS[name]]
