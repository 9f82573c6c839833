"""What PromSource asks, word for word. That a real server understands it: test_promql.py."""

import json
import threading
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from prometheus_client.samples import Sample

from kvpilot.engine.stats import StatsSnapshot
from kvpilot.exporter.promql import PromSource

NOW, SCRAPES = 1000.0, (930.0, 960.0, 990.0)


class TwoSamples:
    """A Reading of an engine that exports its clock and one counter."""

    anchor, progress = "toy_time", "toy_steps_total"

    @property
    def sample_names(self) -> list[str]:
        return ["toy_time", "toy_steps_total", "toy_waiting"]

    def snapshot(self, samples: Iterable[Sample], time: float) -> StatsSnapshot:
        return StatsSnapshot(
            time=time, values={(sample.name, ()): sample.value for sample in samples}, histograms={}
        )


@pytest.fixture
def prometheus() -> Iterator[Any]:
    """Knows one target, scraped three times; `asked` keeps (query, time) as they came."""

    def result(query: str) -> Any:
        if query == "time()":
            return [NOW, str(NOW)]
        names = [{"__name__": name, "job": "toy"} for name in TwoSamples().sample_names[:2]]
        if query.endswith("s]"):
            return [{"metric": name, "values": [[at, str(at)] for at in SCRAPES]} for name in names]
        return [{"metric": name, "value": [NOW, "7"]} for name in names]

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            fields = parse_qs(urlsplit(self.path).query)
            query, at = fields["query"][0], fields.get("time", [""])[0]
            asked.append((query, at))
            raw = json.dumps({"status": "success", "data": {"result": result(query)}}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

    asked: list[tuple[str, str]] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("selector", "labels"), [({}, ""), ({"pod": 'a"1'}, r',pod="a\"1"')])
def test_a_window_asks_for_the_clock_the_history_and_both_ends(prometheus, selector, labels):
    url, asked = prometheus
    source = PromSource(url, selector=selector, max_age_seconds=45.0, reading=TwoSamples())
    window = source.window(30.0)
    source.close()
    assert (window.start.time, window.end.time, window.restarted) == (960.0, 990.0, False)
    history = f'{{__name__=~"toy_time|toy_steps_total"{labels}}}[390s]'  # 1.5 windows, the age, 300 s
    values = f'{{__name__=~"toy_time|toy_steps_total|toy_waiting"{labels}}}'
    assert asked == [
        ("time()", ""),
        (history, "1000.000"),
        (values, "960.000"),
        (values, "990.000"),
    ]
