"""vLLM: what it exports and which of our knobs it has. Read from 0.33."""

from kvpilot.exporter.adapters.base import MetricMap
from kvpilot.exporter.adapters.capabilities import Adapter, Capability

METRIC_MAP = MetricMap(
    engine="vLLM",
    versions="0.33",
    gauges={
        "requests_running": "vllm:num_requests_running",
        "requests_waiting": "vllm:num_requests_waiting",
    },
    counters={
        "preemptions": "vllm:num_preemptions_total",
        "requests_finished": "vllm:request_success_total",
        "prompt_tokens": "vllm:prompt_tokens_total",
        "generation_tokens": "vllm:generation_tokens_total",
        "prefix_query_tokens": "vllm:prefix_cache_queries_total",
        "prefix_hit_tokens": "vllm:prefix_cache_hits_total",
    },
    histograms={
        "time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
        "inter_token_seconds": "vllm:inter_token_latency_seconds",
        "e2e_request_seconds": "vllm:e2e_request_latency_seconds",
        "queue_seconds": "vllm:request_queue_time_seconds",
    },
    live_share="vllm:kv_cache_usage_perc",
    former={
        "vllm:gpu_cache_usage_perc": "vllm:kv_cache_usage_perc",
        "vllm:time_per_output_token_seconds_bucket": "vllm:inter_token_latency_seconds_bucket",
        "vllm:gpu_prefix_cache_queries_total": "vllm:prefix_cache_queries_total",
        "vllm:gpu_prefix_cache_hits_total": "vllm:prefix_cache_hits_total",
    },
)

ADAPTER = Adapter(
    metric_map=METRIC_MAP,
    version_paths=("/version",),
    live_paths={"max_batch": "/v1/runtime_config"},
    capabilities=(
        Capability("max_batch", "--max-num-seqs {value}", "requests in a batch, fixed at start"),
        Capability(
            "kv_level",
            "--kv-cache-dtype {value}",
            "of the whole cache, fixed at start",
            values={0: "auto", 1: "fp8_e4m3"},
        ),
        Capability(
            "ttl_seconds", None, "cached blocks are evicted least recently used first, whatever their age"
        ),
        Capability("size_factor", None, "no share of the cache is protected"),
    ),
)
