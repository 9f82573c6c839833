"""A small HTTP server that keeps the contract of the engine's /metrics and admin API."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvpilot.engine.config import EngineConfig, Knobs, knob_bounds, validate_knobs
from kvpilot.engine.errors import KnobInvalidError
from kvpilot.engine.stats import METRICS, StatsRecorder
from kvpilot.exporter.collector import EngineCollector

TOKEN = "test-token"


class FakeEngine:
    """What a test sets: `gauges`, `defer` (knobs whose change stays pending), `fail` (status for the next
    requests, by method), `delay_seconds`. It counts the PATCHes it got."""

    def __init__(self) -> None:
        self.config = EngineConfig()
        self.effective = Knobs().as_dict()
        self.requested = Knobs().as_dict()
        self.revision = 1
        self.recorder = StatsRecorder()
        self.clock_offset_seconds = 500.0  # the engine's clock is not the loop's
        self.stopped_clock: float | None = None
        self.tokens_per_scrape = 8
        self.gauges = {
            **{(n, ()): 0.0 for n, metric in METRICS.items() if metric.kind == "gauge" and not metric.labels},
            ("requests_running", ()): 4.0,
            ("requests_waiting", ()): 0.0,
            ("waiting_mean_seconds", ()): 0.0,
            ("waiting_oldest_seconds", ()): 0.0,
            ("pool_bytes", ()): 1000.0,
            ("knob_revision", ()): 1.0,
            ("pool_free_bytes", ()): 600.0,
            ("page_bytes", ("live", "bf16")): 300.0,
            ("page_bytes", ("retained", "int8")): 100.0,
        }
        self.defer: set[str] = set()
        self.fail: dict[str, int] = {}
        self.garbage = False
        self.apply_then_fail = False
        self.delay_seconds = 0.0
        self.patches: list[dict] = []
        self.chats: list[dict] = []  # bodies of the chat requests
        self.refuse = 0  # so many chat requests get 429 first
        self.break_stream = False
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def press(self, waiting: float = 12, seconds: float = 5.0) -> None:
        self.gauges[("requests_waiting", ())] = waiting
        self.gauges[("waiting_mean_seconds", ())] = seconds
        self.gauges[("waiting_oldest_seconds", ())] = seconds * 2

    def now(self) -> float:
        return (
            time.monotonic() + self.clock_offset_seconds if self.stopped_clock is None else self.stopped_clock
        )

    def metrics(self) -> str:
        if self.stopped_clock is None:
            self.recorder.add("steps")
            self.recorder.add("generation_tokens", self.tokens_per_scrape)
        registry = CollectorRegistry()
        snapshot = self.recorder.snapshot(self.now(), self.gauges)
        EngineCollector(lambda: snapshot, model_name="fake", info={}, registry=registry)
        return generate_latest(registry).decode()

    def chat_events(self, body: dict) -> list[str]:
        words = [f"w{i} " for i in range(body["max_tokens"])]
        deltas = [{"choices": [{"delta": {"content": word}}]} for word in words]
        if self.break_stream:
            return [json.dumps(delta) for delta in deltas[:2]]
        details = {"cached_tokens": 32}
        usage = {"completion_tokens": len(words), "prompt_tokens": 40, "prompt_tokens_details": details}
        return [*map(json.dumps, [*deltas, {"choices": [], "usage": usage}]), "[DONE]"]

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def get_knobs(self) -> tuple[int, dict]:
        bounds = {
            name: {"low": b.low, "high": b.high, "integer": b.integer, "scale": b.scale}
            for name, b in knob_bounds(self.config).items()
        }
        deferred = [name for name in self.requested if self.requested[name] != self.effective[name]]
        return 200, {
            "revision": self.revision,
            "knobs": self.effective,
            "requested": self.requested,
            "deferred": deferred,
            "bounds": bounds,
            "classes": dict.fromkeys(bounds, "hot"),
        }

    def patch_knobs(self, body: dict) -> tuple[int, dict]:
        self.patches.append(body)
        if body.get("expected_revision", self.revision) != self.revision:
            return 409, {"error": "stale", "expected": body["expected_revision"], "current": self.revision}
        try:
            clean = validate_knobs(body["knobs"], self.config)
        except KnobInvalidError as error:
            invalid = {"field": error.field, "value": error.value, "bounds": error.bounds}
            return 422, {"error": "invalid", **invalid, "message": str(error)}
        results = {}
        for name, value in clean.items():
            self.requested[name] = value
            results[name] = "deferred" if name in self.defer else "applied"
            if name not in self.defer:
                self.effective[name] = value
        self.revision += 1
        return 200, {"revision": self.revision, "results": results, "knobs": self.effective}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                pass

            def answer(self, status: int, body: object) -> None:
                raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header(
                    "Content-Type", "text/plain" if isinstance(body, str) else "application/json"
                )
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def do_GET(self) -> None:
                time.sleep(engine.delay_seconds)
                if "GET" in engine.fail:
                    return self.answer(engine.fail["GET"], {})
                if engine.garbage:
                    return self.answer(200, "<html>login</html>")
                if self.path == "/metrics":
                    return self.answer(200, engine.metrics())
                if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    return self.answer(401, {"error": "unauthorized"})
                return self.answer(*engine.get_knobs())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                engine.chats.append(body)
                if engine.refuse:
                    engine.refuse -= 1
                    self.send_response(429)
                    self.send_header("Retry-After", "0")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                self.send_response(200)
                self.end_headers()
                for event in engine.chat_events(body):
                    self.wfile.write(f"data: {event}\n\n".encode())

            def do_PATCH(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if "PATCH" in engine.fail:
                    if engine.apply_then_fail:
                        engine.patch_knobs(body)
                    return self.answer(engine.fail["PATCH"], {})
                return self.answer(*engine.patch_knobs(body))

        return Handler


@pytest.fixture
def engine():
    fake = FakeEngine()
    yield fake
    fake.stop()


@pytest.fixture
def token() -> str:
    return TOKEN
