"""PromSource against a real Prometheus server, held against what was served to it."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvpilot.engine.errors import ConfigError
from kvpilot.engine.stats import METRICS, StatsRecorder, StatsSnapshot, StatsWindow
from kvpilot.env.observation import observe
from kvpilot.exporter.collector import EngineCollector, metrics_source
from kvpilot.exporter.promql import PromSource, render_selector
from kvpilot.exporter.scrape import Scraper, parse_metrics
from kvpilot.exporter.source import NoHistoryError, ScrapeSource, SourceError

LABELS = {"state": "retained", "level": "int8", "reason": "stop", "name": "kv_level"}


class Target:
    """An engine's /metrics whose counters grow with every look; keeps what it has told."""

    def __init__(self) -> None:
        self.served: list[StatsSnapshot] = []
        self.renamed: tuple[str, str] = ("", "")
        self.lock = threading.Lock()
        self.restart()
        target = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body, content_type = target.render()
                self.send_response(200)
                self.send_header("Content-Type", content_type)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def restart(self, head_start: int = 0) -> None:
        with self.lock:
            self.recorder, self.looks = StatsRecorder(), head_start

    def render(self) -> tuple[bytes, str]:
        with self.lock:
            self.looks += 1
            self._work(self.looks)
            gauges = {
                (name, tuple(LABELS[label] for label in metric.labels)): float(self.looks)
                for name, metric in METRICS.items()
                if metric.kind == "gauge"
            }
            snapshot = self.recorder.snapshot(time.monotonic(), gauges)
            registry = CollectorRegistry()
            EngineCollector(lambda: snapshot, model_name='m "1"', info={}, registry=registry)
            body, content_type = metrics_source(registry)()
            self.served.append(parse_metrics(body.decode()))
            old, new = self.renamed
            return body.replace(old.encode(), new.encode()) if old else body, content_type

    def _work(self, look: int) -> None:
        self.recorder.add("steps", look)
        self.recorder.add("generation_tokens", 3 * look)
        self.recorder.add("prompt_tokens", 0.1)
        if look > 2:  # a series that was not there in the first scrapes
            self.recorder.add("requests_finished", 1, "stop")
        for name, metric in METRICS.items():
            if metric.kind == "histogram":
                self.recorder.observe(name, 0.013 * look)


@pytest.fixture(scope="module")
def world(start_prometheus: Callable, wait_until: Callable) -> Iterator[SimpleNamespace]:
    """One server that scrapes five targets every second."""
    started = time.monotonic()
    targets = {name: Target() for name in ("good", "restarted", "overtaken", "renamed", "gone")}
    targets["renamed"].renamed = ("kvpilot_requests_waiting", "kvpilot_requests_in_queue")
    server = start_prometheus(
        targets={"engines": [(target.address, {"pod": name}) for name, target in targets.items()]}
    )
    wait_until(lambda: all(len(target.served) >= 4 for target in targets.values()), what="four scrapes")
    targets["restarted"].restart()
    targets["overtaken"].restart(head_start=5)
    targets["gone"].server.shutdown()
    targets["gone"].server.server_close()
    wait_until(lambda: len(targets["good"].served) >= 9, what="nine scrapes")
    yield SimpleNamespace(started=started, targets=targets, server=server, **targets)
    for name, target in targets.items():
        if name != "gone":
            target.server.shutdown()
            target.server.server_close()


@pytest.fixture
def source_of(world: SimpleNamespace) -> Iterator[Callable[..., PromSource]]:
    sources = []

    def make(pod: str, **options: Any) -> PromSource:
        sources.append(PromSource(world.server.url, selector={"pod": pod}, **options))
        return sources[-1]

    yield make
    for source in sources:
        source.close()


@pytest.mark.e2e
class TestAgainstPrometheus:
    def test_both_ends_are_what_the_engine_said(self, world, source_of):
        window = source_of("good").window(4)
        assert window.start in world.good.served
        assert window.end in world.good.served
        assert window.seconds == pytest.approx(4, abs=0.6)
        assert not window.is_reset()

    def test_a_direct_scrape_gives_the_same_window(self, world, source_of, wait_until):
        """Within one scrape interval: the ends of the two windows lie less than that apart."""
        scrape = ScrapeSource(Scraper(f"http://{world.good.address}/metrics").snapshot)
        with pytest.raises(NoHistoryError):
            scrape.window(4)
        before = len(world.good.served)
        wait_until(lambda: len(world.good.served) >= before + 4)
        direct, asked = scrape.window(4), source_of("good").window(4)
        times = [snapshot.time for snapshot in world.good.served]
        for end in ("start", "end"):
            one, other = getattr(direct, end), getattr(asked, end)
            assert abs(one.time - other.time) <= 1.3
            assert abs(times.index(one.time) - times.index(other.time)) <= 2
        same = StatsWindow(
            start=world.good.served[times.index(asked.start.time)],
            end=world.good.served[times.index(asked.end.time)],
        )
        assert observe(asked) == observe(same)

    def test_a_restart_shows(self, world, source_of):
        assert source_of("restarted").window(time.monotonic() - world.started).is_reset()

    def test_so_does_one_whose_counters_have_caught_up(self, world, source_of):
        window = source_of("overtaken").window(time.monotonic() - world.started)
        assert window.is_reset()
        assert not replace(window, restarted=False).is_reset()

    def test_samples_that_are_too_old(self, source_of):
        with pytest.raises(
            SourceError, match=r'pod="gone".* newest sample is \d+ s old, expected at most 2 s'
        ):
            source_of("gone", max_age_seconds=2).window(4)

    def test_a_missing_metric_is_named(self, source_of):
        with pytest.raises(SourceError, match="kvpilot_requests_waiting: missing"):
            source_of("renamed").window(4)

    def test_several_targets_need_a_label(self, world):
        source = PromSource(world.server.url, selector={"job": "engines"})
        with pytest.raises(SourceError, match=r"matches 5 targets, expected 1: add labels to tell .*'pod'"):
            source.window(4)

    def test_nobody_has_these_labels(self, source_of):
        with pytest.raises(SourceError, match=r'pod="no\\"one".*do the labels fit'):
            source_of('no"one').window(4)

    def test_a_window_longer_than_the_history(self, source_of):
        with pytest.raises(NoHistoryError, match="no sample is 1800 s older"):
            source_of("good").window(3600)


class Hanging:
    """Accepts and says nothing, or something else."""

    def __init__(self, body: bytes | None) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if body is None:
                    done.wait(20)
                    return
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        done = self.done = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.done.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (None, "does not answer: ReadTimeout"),
        (b"<html>", "not answer|not answer as"),
        (b"{}", "as Prometheus does: KeyError"),
        (b'{"data": {"result": []}}', r"time\(\) gives \[\]"),
    ],
)
def test_a_server_that_is_none(body, message):
    server = Hanging(body)
    try:
        source = PromSource(server.url, timeout_seconds=0.3)
        with pytest.raises(SourceError, match=message):
            source.window(60)
        source.close()
    finally:
        server.close()


def test_no_server(free_port):
    source = PromSource(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(SourceError, match="does not answer: ConnectionError"):
        source.window(60)
    source.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "prometheus:9090"}, "prometheus_url='prometheus:9090'"),
        ({"max_age_seconds": 0}, "max_age_seconds=0"),
        ({"timeout_seconds": float("inf")}, "timeout_seconds=inf"),
        ({"selector": {"pod-name": "x"}}, "'pod-name'"),
        ({"selector": {"__name__": "x"}}, "'__name__'"),
    ],
)
def test_settings_that_cannot_be(options, message):
    with pytest.raises(ConfigError, match=message):
        PromSource(**{"url": "http://127.0.0.1:9090", **options})


def test_label_values_are_quoted():
    assert render_selector({"pod": 'a"\\\n', "job": "b"}) == 'pod="a\\"\\\\\\n",job="b"'
