"""Recording and alert rules. Every alert has a section of its name in docs/runbook.md."""

from dataclasses import dataclass
from typing import Any

import yaml

from kvpilot.dashboards.names import agent, engine
from kvpilot.dashboards.promql import Series

TTFT_SLO_SECONDS = 5.0  # as env.slo.Slo: both are bounds of the histograms
INTER_TOKEN_SLO_SECONDS = 0.1
SLO_SHARE = 0.05  # of the requests, or of the gaps between tokens, that may lie beyond
TARGET = ("namespace", "pod", "instance")
RUNBOOK = "docs/runbook.md"
LIVE = 'state="live"'


def per_target(expression: str) -> str:
    return f"sum by ({', '.join(TARGET)}) ({expression})"


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How long a rule looks back and how long its condition must hold: in seconds, for tests in a hurry too."""

    window_seconds: int = 300
    hold_seconds: int = 120
    silence_seconds: int = 600  # without a decision the loop is stuck


@dataclass(frozen=True, kw_only=True)
class Alert:
    name: str
    expression: str
    severity: str  # page: users notice now. ticket: someone should look today.
    summary: str
    description: str
    hold: bool = True  # the condition must hold for a while; False where one occurrence is enough

    def as_rule(self, timing: Timing) -> dict[str, Any]:
        rule: dict[str, Any] = {"alert": self.name, "expr": self.expression}
        if self.hold:
            rule["for"] = f"{timing.hold_seconds}s"
        return {
            **rule,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook": f"{RUNBOOK}#{self.name.lower()}",
            },
        }


def recordings(timing: Timing) -> dict[str, str]:
    """Expression by name, per target."""
    s = Series(window=f"{timing.window_seconds}s", engines="", agents="", by=TARGET)
    ttft, gap = "time_to_first_token_seconds", "inter_token_seconds"
    return {
        "kvpilot:hit_rate:ratio": s.ratio("prefix_hit_tokens", "prefix_query_tokens"),
        "kvpilot:ttft_seconds:p99": s.quantile(0.99, ttft),
        "kvpilot:inter_token_seconds:p99": s.quantile(0.99, gap),
        "kvpilot:ttft_beyond_slo:ratio": s.share_above(ttft, TTFT_SLO_SECONDS),
        "kvpilot:inter_token_beyond_slo:ratio": s.share_above(gap, INTER_TOKEN_SLO_SECONDS),
        "kvpilot:generation_tokens:rate": s.rate("generation_tokens"),
        "kvpilot:pool_live:ratio": f"{s.gauge('page_bytes', where=LIVE)} / {s.gauge('pool_bytes')}",
        "kvpilot:preemptions_per_admission:ratio": s.ratio("preemptions", "admissions"),
    }


def engine_alerts(timing: Timing) -> list[Alert]:
    """A table, and long like one: an alert per row, in the order of the runbook."""
    s = Series(window=f"{timing.window_seconds}s", engines="", agents="", by=TARGET)
    waiting = s.gauge("requests_waiting")
    stuck = f"changes({engine('generation_tokens')}[{timing.hold_seconds}s])"
    return [
        Alert(
            name="KVPilotTargetDown",
            expression='up{job=~".*kvpilot.*"} == 0',
            severity="page",
            summary="{{ $labels.instance }} cannot be scraped",
            description="An engine or a sidecar has not answered Prometheus for a while.",
        ),
        Alert(
            name="KVPilotTtftBeyondSlo",
            expression=f"kvpilot:ttft_beyond_slo:ratio > {SLO_SHARE}",
            severity="page",
            summary="{{ $value | humanizePercentage }} of first tokens on {{ $labels.instance }} come too late",
            description=f"More than {SLO_SHARE:.0%} of the requests waited longer than {TTFT_SLO_SECONDS:g} s.",
        ),
        Alert(
            name="KVPilotInterTokenBeyondSlo",
            expression=f"kvpilot:inter_token_beyond_slo:ratio > {SLO_SHARE}",
            severity="page",
            summary="{{ $value | humanizePercentage }} of the gaps on {{ $labels.instance }} are too long",
            description=f"More than {SLO_SHARE:.0%} of the gaps were longer than {INTER_TOKEN_SLO_SECONDS:g} s.",
        ),
        Alert(
            name="KVPilotQueueBeyondSlo",
            expression=f"{s.gauge('waiting_oldest_seconds', how='max')} > {TTFT_SLO_SECONDS:g}",
            severity="page",
            summary="A request on {{ $labels.instance }} has waited for {{ $value | humanizeDuration }}",
            description="Requests that are still waiting are in no histogram of latencies yet.",
        ),
        Alert(
            name="KVPilotNoProgress",
            expression=f"{waiting} > 0 unless {per_target(stuck)} > 0",
            severity="page",
            summary="{{ $labels.instance }} has {{ $value }} requests waiting and generates nothing",
            description="The engine answers /metrics and makes no progress: /health alone proves nothing.",
        ),
        Alert(
            name="KVPilotRejecting",
            expression=f"{s.rate('requests_rejected')} > 0",
            severity="page",
            summary="{{ $labels.instance }} refuses {{ $value | humanize }} requests per second",
            description="The waiting queue is full; clients get 429.",
        ),
        Alert(
            name="KVPilotPreempting",
            expression="kvpilot:preemptions_per_admission:ratio > 0.2",
            severity="ticket",
            summary="{{ $value | humanizePercentage }} of admissions on {{ $labels.instance }} repeat work",
            description="Running requests are sent back to the queue for want of memory: max_batch is too high.",
        ),
        Alert(
            name="KVPilotHitRateFell",
            expression="kvpilot:hit_rate:ratio < 0.5 * avg_over_time(kvpilot:hit_rate:ratio[6h] offset 1h)",
            severity="ticket",
            summary="Hit rate on {{ $labels.instance }} is {{ $value | humanizePercentage }}",
            description="Less than half of what it was on average in the six hours before the last.",
        ),
    ]


def agent_alerts(timing: Timing) -> list[Alert]:
    """A table, and long like one: an alert per row, in the order of the runbook."""
    window = f"{timing.window_seconds}s"

    def refused(reason: str) -> str:
        series = f'{agent("refusals")}{{reason="{reason}"}}'
        return f"{per_target(f'increase({series}[{window}])')} > 0"

    def increase(name: str, reach: str) -> str:
        return per_target(f"increase({agent(name)}[{reach}])")

    return [
        Alert(
            name="KVPilotLoopSilent",
            expression=f"{increase('decisions', f'{timing.silence_seconds}s')} == 0",
            severity="ticket",
            summary="The sidecar {{ $labels.instance }} decides nothing",
            description="Not even to hold. The knobs stay where they are.",
        ),
        Alert(
            name="KVPilotSafeMode",
            expression=f"{agent('safe_mode')} == 1",
            severity="ticket",
            summary="The sidecar {{ $labels.instance }} is in safe mode",
            description="It has taken back too many changes in an hour and changes nothing until someone resets it.",
            hold=False,
        ),
        Alert(
            name="KVPilotBreakerOpen",
            expression=f"{agent('breaker_open')} == 1",
            severity="ticket",
            summary="The circuit breaker of {{ $labels.instance }} is open",
            description="Decisions failed or came too late several times in a row.",
        ),
        Alert(
            name="KVPilotObservationStale",
            expression=f"{agent('observation_age_seconds')} > {timing.window_seconds}",
            severity="ticket",
            summary="The sidecar {{ $labels.instance }} sees nothing newer than {{ $value | humanizeDuration }}",
            description="Prometheus or the engine's /metrics does not answer it; it holds.",
        ),
        Alert(
            name="KVPilotKnobsChangedByOthers",
            expression=refused("someone-else-changed-the-knobs"),
            severity="ticket",
            summary="Someone besides {{ $labels.instance }} changes its engine's knobs",
            description="The sidecar freezes after each such change: there must be one writer.",
            hold=False,
        ),
        Alert(
            name="KVPilotAuditFailing",
            expression=refused("audit-failed"),
            severity="ticket",
            summary="The sidecar {{ $labels.instance }} cannot write its audit log",
            description="No audit, no action: it holds.",
            hold=False,
        ),
        Alert(
            name="KVPilotQualityBudget",
            expression=refused("quality-budget"),
            severity="ticket",
            summary="The KV cache behind {{ $labels.instance }} loses more quality than its budget allows",
            description="kv_level may not rise any further.",
        ),
        Alert(
            name="KVPilotReverting",
            expression=f"{increase('reverts', '1h')} > 1",
            severity="ticket",
            summary="{{ $labels.instance }} took back {{ $value | humanize }} changes within an hour",
            description="The policy's changes make the SLO worse; one or two more latch safe mode.",
            hold=False,
        ),
    ]


def rule_document(timing: Timing | None = None) -> dict[str, Any]:
    """Groups of rules."""
    timing = timing or Timing()
    recorded = [{"record": name, "expr": expression} for name, expression in recordings(timing).items()]
    return {
        "groups": [
            {"name": "kvpilot-recordings", "rules": recorded},
            {"name": "kvpilot-engine", "rules": [one.as_rule(timing) for one in engine_alerts(timing)]},
            {"name": "kvpilot-control", "rules": [one.as_rule(timing) for one in agent_alerts(timing)]},
        ]
    }


def render_rules(timing: Timing | None = None) -> str:
    """A rule file for `rule_files`."""
    return _yaml(rule_document(timing))


def _yaml(document: dict[str, Any]) -> str:
    head = "# Written by `python -m kvpilot.dashboards`: change dashboards/rules.py.\n"
    return head + yaml.safe_dump(document, sort_keys=False, width=110)
