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
            title="Safe mode and circuit breaker",
            queries=(
                (S.agent_gauge("safe_mode", how="sum"), "in safe mode"),
                (S.agent_gauge("breaker_open", how="sum"), "breaker open"),
            ),
            kind="number",
            span=6,
            tells="Sidecars that hold whatever the policy says. Safe mode is left by hand only.",
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

VALUE = Row(
    title="Objective, observed and counterfactual",
    panels=(
        Panel(
            title="Objective",
            queries=(
                (S.agent_gauge("objective", how="avg"), "now"),
                (
                    S.agent_gauge("counterfactual", where='metric="objective"', how="avg"),
                    "with the proposed knobs",
                ),
            ),
            tells="The live reward: goodput and hit rate less quality loss. Simulated for the proposed knobs.",
        ),
        Panel(
            title="Hit rate",
            queries=(
                (S.agent_gauge("observed", where='metric="hit_rate"', how="avg"), "observed"),
                (
                    S.agent_gauge("counterfactual", where='metric="hit_rate"', how="avg"),
                    "with the proposed knobs",
                ),
            ),
            unit="percentunit",
            tells="Simulated for the proposed knobs on the traffic that arrived.",
        ),
        Panel(
            title="Time to first token p99",
            queries=(
                (S.agent_gauge("observed", where='metric="ttft_p99_seconds"', how="avg"), "observed"),
                (
                    S.agent_gauge("counterfactual", where='metric="ttft_p99_seconds"', how="avg"),
                    "with the proposed knobs",
                ),
            ),
            unit="s",
            tells="Simulated for the proposed knobs on the traffic that arrived.",
        ),
        Panel(
            title="Mean latency",
            queries=(
                (S.agent_gauge("observed", where='metric="e2e_mean_seconds"', how="avg"), "observed"),
                (
                    S.agent_gauge("counterfactual", where='metric="e2e_mean_seconds"', how="avg"),
                    "with the proposed knobs",
                ),
            ),
            unit="s",
            tells="Arrival to last token.",
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

ROWS = (STATE, Row(title="Knobs", panels=tuple(_knob(name) for name in KNOBS)), DECISIONS, VALUE)
