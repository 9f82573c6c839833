"""Control: what the policy wants, what the guard leaves of it, and what came of it."""

from kvpilot.dashboards.panels import Panel, Row
from kvpilot.dashboards.promql import Series, or_none

TELLS = "The sidecars: mode, policy, proposals, refusals, and the counterfactual beside what was observed."
S = Series()
KNOBS = ("ttl_seconds", "size_factor", "max_batch", "kv_level")

STATE = Row(
    title="State",
    panels=(
        Panel(
            title="Mode",
            queries=((f"{S.agent_gauge('mode', 'mode', how='sum')} > 0", "{{mode}}"),),
            kind="number",
            span=6,
            tells="Sidecars in each mode. Only canary and auto write.",
        ),
        Panel(
            title="Policy",
            queries=((S.agent_gauge("policy_info", "name", "hash", how="sum"), "{{name}} {{hash}}"),),
            kind="number",
            span=6,
            tells="Sidecars by the policy that they run, with the hash of its file.",
        ),
        Panel(
            title="Who writes, who holds",
            queries=(
                (S.agent_gauge("acts", how="sum"), "write"),
                (S.agent_gauge("safe_mode", how="sum"), "in safe mode"),
                (S.agent_gauge("breaker_open", how="sum"), "breaker open"),
                (S.agent_gauge("frozen", how="sum"), "frozen"),
            ),
            kind="number",
            span=6,
            tells="Sidecars. Safe mode is left by hand only; frozen: someone else changed the knobs.",
        ),
        Panel(
            title="Age of the observation",
            queries=((S.agent_gauge("observation_age_seconds"), "oldest"),),
            unit="s",
            span=6,
            tells="What is decided on. Older than the guard's limit: hold.",
        ),
    ),
)


def _knob(name: str) -> Panel:
    where = f'name="{name}"'
    return Panel(
        title=name,
        queries=(
            (S.agent_gauge("proposed_knob", where=where, how="avg"), "proposed"),
            (S.agent_gauge("applied_knob", where=where, how="avg"), "applied"),
            (S.gauge("knob", where=where, how="avg"), "effective"),
        ),
        span=6,
        tells="What the policy wants, what the sidecar has written, what the engine runs with.",
    )


DECISIONS = Row(
    title="Decisions",
    panels=(
        Panel(
            title="Outcomes",
            queries=((or_none(S.agent_increase("decisions", "outcome"), "outcome"), "{{outcome}}"),),
            kind="stacked",
            tells="Decisions by what became of them.",
        ),
        Panel(
            title="Guard refusals by reason",
            queries=((or_none(S.agent_increase("refusals", "reason"), "reason"), "{{reason}}"),),
            kind="stacked",
            tells="Everything that was held or shrunk; docs/runbook.md says what each reason asks for.",
        ),
        Panel(
            title="Reverts and errors",
            queries=(
                (S.agent_increase("reverts"), "reverts"),
                (or_none(S.agent_increase("errors", "kind"), "kind"), "error: {{kind}}"),
            ),
            tells="Changes taken back because the SLO suffered; failures of the loop's surroundings.",
        ),
    ),
)


SIMULATED = "Simulated on the recorded traffic, or on an estimate of it that is drawn from statistics."


def _compared(title: str, metric: str, tells: str, unit: str = "short") -> Panel:
    where = f'metric="{metric}"'
    return Panel(
        title=title,
        queries=(
            (S.agent_gauge("observed", where=where, how="avg"), "observed"),
            (
                S.agent_gauge("counterfactual_baseline", "traffic", where=where, how="avg"),
                "simulated, present knobs, {{traffic}} traffic",
            ),
            (
                S.agent_gauge("counterfactual", "traffic", where=where, how="avg"),
                "simulated, proposed knobs, {{traffic}} traffic",
            ),
        ),
        unit=unit,
        span=6,
        tells=tells,
    )


VALUE = Row(
    title="Objective, observed and counterfactual",
    panels=(
        _compared(
            "Objective", "objective", "The live reward: goodput under the SLO and hits less quality loss."
        ),
        _compared("Hit rate", "hit_rate", SIMULATED, "percentunit"),
        _compared("Time to first token p99", "ttft_p99_seconds", SIMULATED, "s"),
        _compared("Mean latency", "e2e_mean_seconds", "Arrival to last token.", "s"),
    ),
)

LIMITS = Row(
    title="Limits",
    panels=(
        Panel(
            title="SLO pressure and objective",
            queries=(
                (S.agent_gauge("slo_pressure"), "worst pressure"),
                (S.agent_gauge("objective", how="avg"), "objective"),
            ),
            tells="The worst of measured / limit: above 1 the guard vetoes and steps back.",
        ),
        Panel(
            title="Quality loss",
            queries=((S.agent_gauge("quality_loss", how="avg"), "of what was read"),),
            tells="Mean KL in nats per token over the pages read, by the measured loss of their levels.",
        ),
        Panel(
            title="Time of a decision",
            queries=(
                (S.agent_quantile(0.5, "decision_seconds"), "p50"),
                (S.agent_quantile(0.99, "decision_seconds"), "p99"),
            ),
            unit="s",
            tells="Past its deadline a decision is a hold.",
        ),
    ),
)

ROWS = (STATE, Row(title="Knobs", panels=tuple(_knob(name) for name in KNOBS)), DECISIONS, VALUE, LIMITS)
