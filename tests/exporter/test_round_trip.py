"""Snapshot -> text -> snapshot, and every way the text can be wrong."""

import math

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from kvpilot.engine.stats import METRICS, StatsRecorder, StatsSnapshot, StatsWindow
from kvpilot.exporter.collector import CONTENT_TYPE, EngineCollector, metrics_source
from kvpilot.exporter.scrape import ScrapeError, Scraper, parse_metrics

INFO = {"version": "0.1.0", "ladder": 'bf16,"int8"\\\n'}
LABELS = {"state": "retained", "level": "int8", "reason": "stop", "name": "kv_level"}


def to_text(snapshot: StatsSnapshot) -> str:
    registry = CollectorRegistry()
    EngineCollector(lambda: snapshot, model_name='a "model"\\', info=INFO, registry=registry)
    body, content_type = metrics_source(registry)()
    assert content_type == CONTENT_TYPE
    return body.decode()


def make_snapshot(
    values: dict[str, float], observations: dict[str, list[float]] | None = None, time: float = 12.5
) -> StatsSnapshot:
    """All metrics, `values` by name where given, 1.5 otherwise."""
    recorder = StatsRecorder()
    gauges = {}
    for name, metric in METRICS.items():
        labels = tuple(LABELS[label] for label in metric.labels)
        if metric.kind == "counter":
            recorder.add(name, values.get(name, 1.5), *labels)
        elif metric.kind == "gauge":
            gauges[name, labels] = values.get(name, 1.5)
        else:
            for value in (observations or {}).get(name, []):
                recorder.observe(name, value)
    return recorder.snapshot(time, gauges)


@pytest.fixture(scope="module")
def text() -> str:
    return to_text(make_snapshot({}, {"queue_seconds": [0.0005, 0.2, 7e6]}))


numbers = st.floats(min_value=0, max_value=1e300) | st.integers(min_value=0, max_value=2**53)
value_metrics = [name for name, metric in METRICS.items() if metric.kind != "histogram"]
histogram_metrics = [name for name, metric in METRICS.items() if metric.kind == "histogram"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    values=st.dictionaries(st.sampled_from(value_metrics), numbers),
    observations=st.dictionaries(
        st.sampled_from(histogram_metrics), st.lists(st.floats(min_value=0, max_value=1e6), max_size=20)
    ),
    time=st.floats(min_value=0, max_value=1e12),
)
def test_round_trip_is_exact(values, observations, time):
    snapshot = make_snapshot(values, observations, time)
    assert parse_metrics(to_text(snapshot)) == snapshot


def test_series_that_never_counted_survive():
    recorder = StatsRecorder()
    gauges = {(name, ()): 0.0 for name, m in METRICS.items() if m.kind == "gauge" and not m.labels}
    snapshot = recorder.snapshot(0.0, gauges)
    assert parse_metrics(to_text(snapshot)) == snapshot
    assert snapshot.value("preemptions") == 0


def test_the_readers_clock_may_replace_the_engines(text):
    assert parse_metrics(text).time == 12.5


def test_names_follow_the_conventions(text):
    samples = [line.split("{")[0] for line in text.splitlines() if not line.startswith("#")]
    assert all(name.startswith("kvpilot_") for name in samples)
    assert all("model_name=" in line for line in text.splitlines() if not line.startswith("#"))
    for name, metric in METRICS.items():
        if metric.kind == "counter":
            assert f"# TYPE kvpilot_{name}_total counter\n" in text


def test_buckets_are_cumulative_and_end_at_infinity(text):
    buckets = [line for line in text.splitlines() if line.startswith("kvpilot_queue_seconds_bucket")]
    counts = [float(line.rsplit(" ", 1)[1]) for line in buckets]
    assert counts == sorted(counts)
    assert 'le="+Inf"' in buckets[-1]
    assert counts[0] == 1
    assert counts[-1] == 3


def test_unknown_metrics_are_ignored(text):
    more = "# HELP python_gc x\n# TYPE python_gc gauge\npython_gc 1\n"
    newer = "# HELP kvpilot_new x\n# TYPE kvpilot_new gauge\nkvpilot_new 1\n"
    assert parse_metrics(more + newer + text) == parse_metrics(text)


@pytest.mark.parametrize("name", [*METRICS, "snapshot_time_seconds"])
def test_renamed_metric_is_named(text, name):
    with pytest.raises(ScrapeError, match=f"kvpilot_{name}: missing"):
        parse_metrics(text.replace(f"kvpilot_{name}", "kvpilot_other"))


def test_every_truncation_is_noticed(text):
    # the last line is the value of the last metric: only the whole text has it and its end
    for size in range(0, len(text), 97):
        with pytest.raises(ScrapeError):
            parse_metrics(text[:size])
    for size in range(len(text) - 20, len(text)):
        with pytest.raises(ScrapeError):
            parse_metrics(text[:size])


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf"])
@pytest.mark.parametrize(
    "line", ["steps_total", "requests_waiting", "queue_seconds_sum", "queue_seconds_count"]
)
def test_values_that_are_no_numbers_are_named(text, line, value):
    lines = text.splitlines()
    index = next(i for i, x in enumerate(lines) if x.startswith(f"kvpilot_{line}{{"))
    lines[index] = f"{lines[index].rsplit(' ', 1)[0]} {value}"
    with pytest.raises(ScrapeError, match=f"kvpilot_{line.removesuffix('_total').rsplit('_s', 1)[0]}"):
        parse_metrics("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("# TYPE kvpilot_requests_waiting gauge", "# TYPE kvpilot_requests_waiting counter", "is a counter"),
        ('le="0.75"', 'le="0.8"', "buckets"),
        ('level="int8"', 'rung="int8"', "labels"),
        ('le="600.0",model_name="a \\"model\\"\\\\"} 2.0', 'le="600.0"} 1.0', "buckets go down"),
        ("kvpilot_queue_seconds_count", "kvpilot_queue_seconds_sum", "queue_seconds"),
        (" 1.5\n", " one\n", "text format"),
        ("{", "{{", "text format"),
    ],
)
def test_damaged_text(text, old, new, message):
    assert old in text
    with pytest.raises(ScrapeError, match=message):
        parse_metrics(text.replace(old, new))


def test_restart_is_seen_as_a_reset():
    before = make_snapshot({"generation_tokens": 100})
    after = make_snapshot({"generation_tokens": 7}, time=20.0)
    through_text = [parse_metrics(to_text(s)) for s in (before, after)]
    assert StatsWindow(start=through_text[0], end=through_text[1]).is_reset()
    assert not StatsWindow(start=through_text[1], end=through_text[0]).is_reset()


def scrape(response: httpx.Response | Exception) -> StatsSnapshot:
    def answer(request: httpx.Request) -> httpx.Response:
        if isinstance(response, Exception):
            raise response
        return response

    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        return Scraper("http://engine/metrics", client=client).snapshot()


def test_scraper_reads_what_the_collector_wrote(text):
    response = httpx.Response(200, text=text, headers={"content-type": CONTENT_TYPE})
    assert scrape(response) == parse_metrics(text)


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (httpx.Response(503, text="draining"), "status 503"),
        (httpx.Response(200, html="<html>login</html>"), "content type text/html"),
        (httpx.Response(200, content=b"x"), "content type none"),
        (httpx.Response(200, text=""), "truncated"),
        (httpx.ConnectError("refused"), "ConnectError"),
        (httpx.ReadTimeout("slow"), "ReadTimeout"),
        (httpx.RemoteProtocolError("closed in mid-body"), "RemoteProtocolError"),
    ],
)
def test_scraper_says_what_is_wrong(response, message):
    with pytest.raises(ScrapeError, match=message):
        scrape(response)


def test_registering_takes_no_snapshot():
    def fail() -> StatsSnapshot:
        raise AssertionError("snapshot taken")

    EngineCollector(fail, model_name="m", info={}, registry=CollectorRegistry())


def test_quantiles_survive():
    snapshot = make_snapshot({}, {"queue_seconds": [0.1 * i for i in range(50)]})
    read = parse_metrics(to_text(snapshot)).histograms["queue_seconds"]
    assert read.quantile(0.99) == snapshot.histograms["queue_seconds"].quantile(0.99)
    assert math.isclose(read.mean, 2.45)
