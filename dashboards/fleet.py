"""Fleet: one line per pod."""

from kvpilot.dashboards.panels import Panel, Row
from kvpilot.dashboards.promql import Series

TELLS = "Engines and sidecars beside one another: who is behind, who has other knobs."
S = Series(by=("pod", "instance"))
POD = "{{pod}} {{instance}}"
LIVE = 'state="live"'


def _per_pod(title: str, expression: str, tells: str, unit: str = "short") -> Panel:
    return Panel(title=title, queries=((expression, POD),), tells=tells, unit=unit)


SERVING = Row(
    title="Serving",
    panels=(
        _per_pod("Running", S.gauge("requests_running"), "Requests admitted."),
        _per_pod(
            "Waiting", S.gauge("requests_waiting"), "One pod alone with a queue: look at the balancing."
        ),
        _per_pod(
            "Age of the oldest waiting request", S.gauge("waiting_oldest_seconds"), "In each queue.", "s"
        ),
        _per_pod(
            "Time to first token p99",
            S.quantile(0.99, "time_to_first_token_seconds"),
            "Arrival to first token.",
            "s",
        ),
        _per_pod("Between tokens p99", S.quantile(0.99, "inter_token_seconds"), "Of running requests.", "s"),
        _per_pod("Tokens generated", S.rate("generation_tokens"), "Per second."),
    ),
)

MEMORY = Row(
    title="Memory",
    panels=(
        _per_pod(
            "Hit rate",
            S.ratio("prefix_hit_tokens", "prefix_query_tokens"),
            "Share of the prompts' tokens found in the cache. A pod far below the others gets strangers' sessions.",
            "percentunit",
        ),
        _per_pod(
            "Share of the pool in running requests",
            f"{S.gauge('page_bytes', where=LIVE)} / {S.gauge('pool_bytes')}",
            "Above about 0.9 requests wait for memory.",
            "percentunit",
        ),
        _per_pod(
            "Preemptions", S.rate("preemptions"), "Per second: work done twice for want of memory.", "reqps"
        ),
    ),
)

CONTROL = Row(
    title="Control",
    panels=(
        Panel(
            title="Effective knobs",
            queries=((S.gauge("knob", "name"), f"{{{{name}}}} {POD}"),),
            tells="Pods of one deployment should agree, outside a canary.",
        ),
        Panel(
            title="Modes",
            queries=((f"{S.agent_gauge('mode', 'mode')} > 0", f"{{{{mode}}}} {POD}"),),
            tells="One line per sidecar, in the mode that it is in.",
        ),
        _per_pod(
            "Age of the observation",
            S.agent_gauge("observation_age_seconds"),
            "What each sidecar decides on.",
            "s",
        ),
    ),
)

ROWS = (SERVING, MEMORY, CONTROL)
