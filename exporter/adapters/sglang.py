"""SGLang, started with --enable-metrics: what it exports and which of our knobs it has. Read from 0.5.23."""

from kvpilot.exporter.adapters.base import MetricMap
from kvpilot.exporter.adapters.capabilities import Adapter, Capability

# Not sglang:cache_hit_rate: it speaks of the last prefill batch alone.
METRIC_MAP = MetricMap(
    engine="SGLang",
    versions="0.5.23",
    gauges={
        "requests_running": "sglang:num_running_reqs",
        "requests_waiting": "sglang:num_queue_reqs",
    },
    counters={
        "preemptions": "sglang:num_retracted_requests_total",
        "prompt_tokens": "sglang:prompt_tokens_total",
        "generation_tokens": "sglang:generation_tokens_total",
        "prefix_query_tokens": "sglang:prompt_tokens_total",
        "prefix_hit_tokens": "sglang:cached_tokens_total",
        "pages_released": "sglang:evicted_tokens_total",
    },
    histograms={
        "time_to_first_token_seconds": "sglang:time_to_first_token_seconds",
        "inter_token_seconds": "sglang:inter_token_latency_seconds",
    },
    live_share="sglang:token_usage",
    only={"tp_rank": "0"},  # the others, where they are switched on, say the same
    page_counters=frozenset({"pages_released"}),
)

ADAPTER = Adapter(
    metric_map=METRIC_MAP,
    version_paths=("/server_info", "/get_server_info"),
    capabilities=(
        Capability("max_batch", "--max-running-requests {value}", "requests in a batch, fixed at start"),
        Capability(
            "kv_level",
            "--kv-cache-dtype {value}",
            "of the whole cache, fixed at start",
            values={0: "auto", 1: "fp8_e4m3"},
        ),
        Capability(
            "ttl_seconds", None, "cached tokens are evicted in the radix tree's order, whatever their age"
        ),
        Capability("size_factor", None, "no share of the cache is protected"),
    ),
)
