"""Engine: latency, throughput, hit rate, the pool by state and level, evictions by cause."""

from kvpilot.dashboards.panels import Panel, Row
from kvpilot.dashboards.promql import Series, or_none

TELLS = "What the engines serve, how fast, and what their KV pool holds. Sums over the engines chosen."
S = Series()


def _quantiles(name: str, *quantiles: float) -> tuple[tuple[str, str], ...]:
    return tuple((S.quantile(q, name), f"p{100 * q:g}") for q in quantiles)


TRAFFIC = Row(
    title="Traffic",
    panels=(
        Panel(
            title="Requests",
            queries=((S.gauge("requests_running"), "running"), (S.gauge("requests_waiting"), "waiting")),
            tells="A queue that stays means that arrivals exceed what memory or the batch admits.",
        ),
        Panel(
            title="Arrivals and ends",
            queries=(
                (S.rate("requests_received"), "received"),
                (S.rate("requests_rejected"), "refused"),
                (or_none(S.rate("requests_finished", "reason"), "reason"), "ended: {{reason}}"),
            ),
            unit="reqps",
            tells="Refused: the queue was full (429).",
        ),
        Panel(
            title="Age of the queue",
            queries=(
                (S.gauge("waiting_oldest_seconds", how="max"), "oldest"),
                (S.gauge("waiting_mean_seconds", how="avg"), "mean"),
            ),
            unit="s",
            tells="The mean is the strongest single signal of overload.",
        ),
    ),
)

LATENCY = Row(
    title="Latency",
    panels=(
        Panel(
            title="Time to first token",
            queries=_quantiles("time_to_first_token_seconds", 0.5, 0.95, 0.99),
            unit="s",
            tells="From arrival, time in the queue included.",
        ),
        Panel(
            title="Between tokens",
            queries=_quantiles("inter_token_seconds", 0.5, 0.95, 0.99),
            unit="s",
            tells="Rises with the batch and with prefill beside decode.",
        ),
        Panel(
            title="Whole requests, and their part in the queue",
            queries=(
                (S.quantile(0.5, "e2e_request_seconds"), "request p50"),
                (S.quantile(0.99, "e2e_request_seconds"), "request p99"),
                (S.quantile(0.99, "queue_seconds"), "queue p99"),
            ),
            unit="s",
            tells="Arrival to last token; arrival to admission.",
        ),
    ),
)

THROUGHPUT = Row(
    title="Throughput",
    panels=(
        Panel(
            title="Tokens",
            queries=(
                (S.rate("generation_tokens"), "generated"),
                (S.rate("prompt_tokens"), "prompts"),
                (S.rate("prefill_tokens"), "computed in prefill"),
            ),
            unit="short",
            tells="Per second. Prompts less what prefill computed came out of the cache.",
        ),
        Panel(
            title="Steps",
            queries=(
                (S.quantile(0.5, "step_seconds"), "p50"),
                (S.quantile(0.99, "step_seconds"), "p99"),
            ),
            unit="s",
            tells="Duration of an engine step.",
        ),
        Panel(
            title="Preemptions and forced admissions",
            queries=(
                (S.rate("preemptions"), "preemptions"),
                (S.rate("admissions_forced"), "forced admissions"),
            ),
            unit="reqps",
            tells="Work done twice for want of memory; starving requests that took retained pages.",
        ),
    ),
)

CACHE = Row(
    title="Prefix cache",
    panels=(
        Panel(
            title="Hit rate",
            queries=((S.ratio("prefix_hit_tokens", "prefix_query_tokens"), "hit rate"),),
            unit="percentunit",
            maximum=1,
            tells="Share of the prompts' tokens found in the cache.",
        ),
        Panel(
            title="Idle time of pages when hit",
            queries=_quantiles("page_reuse_gap_seconds", 0.5, 0.9),
            unit="s",
            tells="Where ttl_seconds lies below this, pages go before they are wanted again.",
        ),
        Panel(
            title="Idle time of pages when released",
            queries=_quantiles("page_idle_before_release_seconds", 0.1, 0.5),
            unit="s",
            tells="Below the time to the next hit: the pool is too small for the traffic.",
        ),
    ),
)

POOL = Row(
    title="KV pool",
    panels=(
        Panel(
            title="Bytes by state",
            queries=(
                (S.gauge("page_bytes", "state", where='state!="free"'), "{{state}}"),
                (S.gauge("pool_free_bytes"), "free"),
            ),
            unit="bytes",
            kind="stacked",
            tells="live: of running requests. retained: cached and protected. unprotected: cached, next to go.",
        ),
        Panel(
            title="Bytes by level",
            queries=((S.gauge("page_bytes", "level", where='state!="free"'), "{{level}}"),),
            unit="bytes",
            kind="stacked",
            tells="How far pages have been stepped down.",
        ),
        Panel(
            title="Capacity",
            queries=((S.gauge("pool_capacity_tokens", "level"), "all {{level}}"),),
            tells="Tokens that the pool holds if every page has this codec.",
        ),
    ),
)

EVICTIONS = Row(
    title="Evictions by cause",
    panels=(
        Panel(
            title="Protection lost",
            queries=(
                (S.rate("pages_expired"), "older than ttl_seconds"),
                (S.rate("pages_over_budget"), "above size_factor"),
            ),
            unit="ops",
            tells="Pages per second that stay cached, but may go.",
        ),
        Panel(
            title="Released",
            queries=(
                (or_none(S.rate("pages_released", "state"), "state"), "{{state}}"),
                (or_none(S.rate("retained_taken", "reason"), "reason"), "retained, for {{reason}}"),
            ),
            unit="ops",
            tells="Cached pages per second dropped because memory was needed, by their state; retained ones by cause.",
        ),
        Panel(
            title="Stepped down",
            queries=((or_none(S.rate("pages_stepped_down", "level"), "level"), "to {{level}}"),),
            unit="ops",
            tells="Pages per second re-encoded to a lower precision instead of released.",
        ),
    ),
)

QUALITY = Row(
    title="Quality and knobs",
    panels=(
        Panel(
            title="Reads by level",
            queries=((or_none(S.rate("pages_read", "level"), "level"), "{{level}}"),),
            unit="ops",
            kind="stacked",
            tells="Pages per second that decode steps read.",
        ),
        Panel(
            title="Measured loss of a level",
            queries=((S.gauge("kv_quality_loss", "level", how="max"), "{{level}}"),),
            tells="Mean KL in nats per token against an exact cache, on this model.",
        ),
        Panel(
            title="Effective knobs",
            queries=((S.gauge("knob", "name", how="max"), "{{name}}"),),
            tells="What the engine runs with, whoever set it.",
        ),
    ),
)

ROWS = (TRAFFIC, LATENCY, THROUGHPUT, CACHE, POOL, EVICTIONS, QUALITY)
