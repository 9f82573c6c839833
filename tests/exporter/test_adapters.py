"""vLLM and SGLang: their exposition text as our window, and every name that may go missing."""

import math
from pathlib import Path

import httpx
import pytest

from kvpilot.engine.stats import METRICS, StatsWindow
from kvpilot.env.observation import REQUIRED, observe
from kvpilot.exporter.adapters import ADAPTERS, AdaptedSource
from kvpilot.exporter.adapters.base import with_queue_ages
from kvpilot.exporter.promql import PromSource
from kvpilot.exporter.scrape import ScrapeError, Scraper
from kvpilot.exporter.source import ScrapeSource, SourceError

DATA = Path(__file__).parent / "data"
TEXTS = {
    "vllm": (DATA / "vllm_0.33.txt").read_text(encoding="utf-8"),
    "sglang": (DATA / "sglang_0.5.23.txt").read_text(encoding="utf-8"),
}
engines = pytest.mark.parametrize("name", ADAPTERS)


def grown(text: str, factor: float) -> str:
    """The text with every counter and histogram multiplied."""
    lines = []
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        grows = any(suffix in name for suffix in ("_total{", "_bucket{", "_sum{", "_count{"))
        lines.append(line if line.startswith("#") or not grows else f"{name} {float(value) * factor}")
    return "\n".join(lines) + "\n"


def window_of(name: str) -> StatsWindow:
    metric_map = ADAPTERS[name].metric_map
    start = metric_map.parse(TEXTS[name], time=1000.0)
    end = metric_map.parse(grown(TEXTS[name], 3), time=1050.0)
    return with_queue_ages(StatsWindow(start=start, end=end))


def test_vllm_is_observed():
    seen = observe(window_of("vllm"))
    assert (seen.running, seen.waiting, seen.preemptions) == (44, 8, 6)
    assert seen.live_share == pytest.approx(0.8)
    assert seen.hit_rate == pytest.approx(0.64)
    assert seen.tokens_per_second == pytest.approx(2 * 60_000 / 50)
    assert seen.prompt_tokens_per_second == pytest.approx(2 * 150_000 / 50)
    assert seen.ttft_p99_seconds == pytest.approx(2.5 + 2.5 * 39 / 40)
    assert seen.inter_token_p50_seconds == pytest.approx(0.02 + 0.02 * 500 / 900)
    assert seen.waiting_oldest_seconds == pytest.approx(8 * 50 / 200)  # 200 first tokens in 50 s
    assert seen.waiting_mean_seconds == pytest.approx(1.0)
    assert window_of("vllm").delta("requests_finished", "") == 200


def test_sglang_is_observed():
    seen = observe(window_of("sglang"))
    assert (seen.running, seen.waiting, seen.preemptions) == (16, 0, 0)
    assert seen.live_share == pytest.approx(0.62)
    assert seen.hit_rate == pytest.approx(
        0.7
    )  # tokens from all cache sources, not the gauge of the last batch
    assert seen.released_per_second == pytest.approx(2 * 4096 / 50)
    assert (seen.waiting_mean_seconds, seen.waiting_oldest_seconds) == (0, 0)


@engines
def test_what_a_decision_rests_on_is_there(name):
    seen = observe(window_of(name))
    assert all(getattr(seen, signal) is not None for signal in REQUIRED)
    assert not seen.reset


@engines
def test_what_is_not_exported_is_not_zero(name):
    seen = observe(window_of(name))
    for signal in ("rejected", "forced_admissions", "stepped_down_per_second", "quality_loss", "free_share"):
        assert getattr(seen, signal) is None
    assert all(math.isfinite(value) for value in seen.__dict__.values() if isinstance(value, float))


@engines
def test_a_queue_that_does_not_move_has_no_known_age(name):
    metric_map = ADAPTERS[name].metric_map
    waiting = metric_map.gauges["requests_waiting"]
    text = "\n".join(
        f"{line.rpartition(' ')[0]} 5" if line.startswith(waiting + "{") else line
        for line in TEXTS[name].splitlines()
    )
    start, end = metric_map.parse(text, time=0.0), metric_map.parse(text, time=60.0)
    seen = observe(with_queue_ages(StatsWindow(start=start, end=end)))
    assert seen.waiting_mean_seconds is None
    assert seen.waiting_oldest_seconds is None


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        (name, theirs)
        for name, adapter in ADAPTERS.items()
        for theirs in sorted({s.removesuffix("_bucket") for s in adapter.metric_map.sample_names})
        if not theirs.endswith(("_sum", "_count"))
    ],
)
def test_a_missing_name_is_said_and_so_is_the_version(name, theirs):
    metric_map = ADAPTERS[name].metric_map
    text = "\n".join(line for line in TEXTS[name].splitlines() if theirs not in line) + "\n"
    with pytest.raises(
        ScrapeError, match=f"^{theirs}(_bucket)?: missing, .*{metric_map.engine} {metric_map.versions}"
    ):
        metric_map.parse(text, time=0.0)


def test_a_renamed_metric_gets_a_hint():
    text = TEXTS["vllm"].replace("vllm:num_requests_waiting", "vllm:num_waiting_requests")
    with pytest.raises(ScrapeError, match="there is vllm:num_waiting_requests: has it been renamed"):
        ADAPTERS["vllm"].metric_map.parse(text, time=0.0)


def test_an_older_server_is_told_apart():
    text = TEXTS["vllm"].replace("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
    with pytest.raises(ScrapeError, match="vllm:gpu_cache_usage_perc, its name before: the server is older"):
        ADAPTERS["vllm"].metric_map.parse(text, time=0.0)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('engine="0",model_name="Qwen/Qwen3-8B"} 24.0', 'engine="0"} NaN', "num_requests_running: value nan"),
        ('le="+Inf"', 'le="9999"', "expected bounds that end with"),
        ("gauge", "{", "text format"),
        (" 24.0\n", " many\n", "text format"),
    ],
)
def test_damaged_text(old, new, message):
    assert old in TEXTS["vllm"]
    with pytest.raises(ScrapeError, match=message):
        ADAPTERS["vllm"].metric_map.parse(TEXTS["vllm"].replace(old, new), time=0.0)


def test_a_counter_that_is_declared_and_never_counted_is_zero():
    lines = [
        line for line in TEXTS["sglang"].splitlines() if not line.startswith("sglang:evicted_tokens_total")
    ]
    snapshot = ADAPTERS["sglang"].metric_map.parse("\n".join(lines) + "\n", time=0.0)
    assert snapshot.value("pages_released", "") == 0


@engines
def test_the_maps_speak_of_our_metrics(name):
    metric_map = ADAPTERS[name].metric_map
    for kind, table in (
        ("gauge", metric_map.gauges),
        ("counter", metric_map.counters),
        ("histogram", metric_map.histograms),
    ):
        assert {METRICS[ours].kind for ours in table} == {kind}
    assert set(metric_map.former.values()) <= set(metric_map.sample_names)


def test_knobs_become_restart_flags():
    vllm = ADAPTERS["vllm"].advise({"max_batch": 48.7, "kv_level": 2, "ttl_seconds": 60})
    assert [advice.flag for advice in vllm] == ["--max-num-seqs 48", "--kv-cache-dtype fp8_e4m3", None]
    assert "1 is the lowest precision it has" in vllm[1].note
    assert (
        str(vllm[0])
        == "max_batch -> 48.7: restart with --max-num-seqs 48 (requests in a batch, fixed at start)"
    )
    assert "cannot be set" in str(vllm[2])
    sglang = ADAPTERS["sglang"].advise({"kv_level": 0, "max_batch": 8})
    assert [advice.flag for advice in sglang] == ["--max-running-requests 8", "--kv-cache-dtype auto"]


def served(answers: dict[str, object]) -> httpx.Client:
    def answer(request: httpx.Request) -> httpx.Response:
        body = answers.get(request.url.path)
        return httpx.Response(404) if body is None else httpx.Response(200, json=body)

    return httpx.Client(transport=httpx.MockTransport(answer))


@pytest.mark.parametrize(
    ("name", "answers", "expected"),
    [
        ("vllm", {"/version": {"version": "0.33.1"}}, ("0.33.1", True, set())),
        ("vllm", {"/version": {"version": "0.34.0"}}, ("0.34.0", False, set())),
        (
            "vllm",
            {"/version": {"version": "0.35"}, "/openapi.json": {"paths": {"/v1/runtime_config": {}}}},
            ("0.35", False, {"max_batch"}),
        ),
        ("sglang", {"/get_server_info": {"version": "0.5.23"}}, ("0.5.23", True, set())),
        ("sglang", {"/server_info": {"version": "0.5.3"}}, ("0.5.3", False, set())),
    ],
)
def test_version_and_live_knobs_are_asked_for(name, answers, expected):
    with served(answers) as client:
        found = ADAPTERS[name].discover("http://engine", client=client)
    assert (found.version, found.is_mapped, set(found.live)) == expected


@pytest.mark.parametrize("answers", [{}, {"/version": {"v": 1}}, {"/version": ["0.33"]}])
def test_a_server_that_does_not_say_its_version(answers):
    with served(answers) as client, pytest.raises(SourceError, match=r"at /version: is it vLLM\?"):
        ADAPTERS["vllm"].discover("http://engine", client=client)


def test_a_scrape_source_of_another_engine():
    clock = iter((100.0, 160.0))
    texts = iter((TEXTS["vllm"], grown(TEXTS["vllm"], 2)))
    transport = httpx.MockTransport(
        lambda request: httpx.Response(200, text=next(texts), headers={"content-type": "text/plain"})
    )
    with httpx.Client(transport=transport) as client:
        parse = lambda text: ADAPTERS["vllm"].metric_map.parse(text, time=next(clock))  # noqa: E731
        scraper = Scraper("http://engine/metrics", client=client, parse=parse)
        source = AdaptedSource(ScrapeSource(scraper.snapshot))
        with pytest.raises(SourceError):
            source.window(60)
        window = source.window(60)
    assert window.seconds == 60
    assert window.end.value("waiting_oldest_seconds") == pytest.approx(8 * 60 / 100)


@pytest.mark.e2e
@engines
def test_prometheus_gives_the_same(name, start_prometheus, wait_until):
    """The text through a real server; both instants say the same, since the text does not change."""
    import threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(TEXTS[name].encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        server = start_prometheus(targets={name: [(f"127.0.0.1:{http.server_port}", {})]})
        metric_map = ADAPTERS[name].metric_map
        source = PromSource(server.url, selector={"job": name}, reading=metric_map)
        wait_until(
            lambda: (
                int(server.query(f"count_over_time({metric_map.anchor}[1m])")[0]["value"][1]) >= 3
                if server.query(metric_map.anchor)
                else None
            )
        )
        window = source.window(2)
        source.close()
        http.shutdown()
    parsed = metric_map.parse(TEXTS[name], time=window.end.time)
    assert {key: repr(value) for key, value in window.end.values.items()} == {
        key: repr(value) for key, value in parsed.values.items()
    }
    assert window.end.histograms == parsed.histograms
