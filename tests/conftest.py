"""Real servers for the tests that need one: Prometheus (`.ci/install-prometheus`) and an OTLP receiver.

Needs the standard library and pytest only: this file is loaded on GPU machines too.
"""

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

with suppress(ImportError):  # how long an example takes says something about the machine only
    import hypothesis

    hypothesis.settings.register_profile("kvpilot", deadline=None)
    hypothesis.settings.load_profile("kvpilot")

PROGRAMS = ("prometheus", "promtool")
Probe = Callable[[], Any]


def wait_until(probe: Probe, *, seconds: float = 30.0, what: str = "") -> Any:
    """The first true result of `probe`; fails the test if there is none in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = probe()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds:g} s: {what or probe}")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@dataclass(kw_only=True)
class Prometheus:
    """A running server and what a test asks it."""

    url: str
    process: subprocess.Popen[bytes]
    log_path: Path

    def query(self, expression: str) -> list[dict[str, Any]]:
        import httpx

        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expression}, trust_env=False)
        assert answer.status_code == 200, f"{expression}: {answer.text}"
        return answer.json()["data"]["result"]

    def alerts(self) -> dict[str, str]:
        """Active alerts and their state (pending, firing)."""
        import httpx

        answer = httpx.get(f"{self.url}/api/v1/alerts", trust_env=False).json()
        return {alert["labels"]["alertname"]: alert["state"] for alert in answer["data"]["alerts"]}


@pytest.fixture(scope="session")
def prometheus_programs() -> dict[str, str]:
    """Paths of the programs, by name."""
    found = {name: path for name in PROGRAMS if (path := shutil.which(name))}
    missing = [name for name in PROGRAMS if name not in found]
    if missing:
        message = f"{', '.join(missing)} not found: run .ci/install-prometheus"
        if os.environ.get("KVPILOT_REQUIRE_PROMETHEUS") == "1":
            pytest.fail(message)
        pytest.skip(message)
    return found


@pytest.fixture(scope="module")
def start_prometheus(
    prometheus_programs: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Prometheus]]:
    """start(targets={job: [(host:port, labels)]}, interval="1s", rule_files=())."""
    started: list[Prometheus] = []

    def start(
        *,
        targets: Mapping[str, list[tuple[str, dict[str, str]]]],
        interval: str = "1s",
        rule_files: tuple[Path, ...] = (),
    ) -> Prometheus:
        directory = tmp_path_factory.mktemp("prometheus")
        config: dict[str, Any] = {
            "global": {
                "scrape_interval": interval,
                "scrape_timeout": interval,
                "evaluation_interval": interval,
            },
            "rule_files": [str(path) for path in rule_files],
            "scrape_configs": [
                {
                    "job_name": job,
                    "static_configs": [{"targets": [address], "labels": labels} for address, labels in some],
                }
                for job, some in targets.items()
            ],
        }
        path = directory / "prometheus.yml"
        path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        address = f"127.0.0.1:{free_port()}"
        command = [
            prometheus_programs["prometheus"],
            f"--config.file={path}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address={address}",
        ]
        log_path = directory / "prometheus.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        server = Prometheus(url=f"http://{address}", process=process, log_path=log_path)
        started.append(server)
        wait_until(lambda: _ready(server), what=f"Prometheus is ready, see {log_path}")
        return server

    yield start
    for server in started:
        server.process.terminate()
        server.process.wait(10)


def _ready(server: Prometheus) -> bool:
    import httpx

    assert server.process.poll() is None, server.log_path.read_text(encoding="utf-8")[-2000:]
    try:
        return httpx.get(f"{server.url}/-/ready", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


class Collector:
    """A real OTLP/HTTP receiver in this process; `spans` and `services` grow with what it is sent."""

    def __init__(self, service: Any) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = service.ExportTraceServiceRequest()
                request.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
                for part in request.resource_spans:
                    about = {a.key: a.value.string_value for a in part.resource.attributes}
                    collector.services.add(about["service.name"])
                    collector.spans += [span for scope in part.scope_spans for span in scope.spans]
                self.send_response(200 if self.path == "/v1/traces" else 404)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture(scope="module")
def start_collector() -> Iterator[Callable[[], Collector]]:
    """Skips without the extra `otel`."""
    service = pytest.importorskip(
        "opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="needs kvpilot[otel]"
    )
    started: list[Collector] = []

    def start() -> Collector:
        started.append(Collector(service))
        threading.Thread(target=started[-1].server.serve_forever, daemon=True).start()
        return started[-1]

    yield start
    for collector in started:
        collector.server.shutdown()
        collector.server.server_close()


@pytest.fixture(scope="session")
def dashboards_folder() -> Path:
    """Where dashboards and rules lie."""
    return Path(str(files("kvpilot.dashboards")))


@pytest.fixture(scope="session")
def boards(dashboards_folder: Path) -> dict[str, dict[str, Any]]:
    """The checked-in dashboards, by file name."""
    paths = sorted(dashboards_folder.glob("*.json"))
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in paths}


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine under load, to throw kill switches at; at the end no request may be lost (`rehearsal.py`)."""
    spec = importlib.util.spec_from_file_location("rehearsal", Path(__file__).with_name("rehearsal.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with module.rehearsal(tmp_path_factory.mktemp("rehearsal"), wait_until, free_port) as rehearsal:
        yield rehearsal


@pytest.fixture(name="wait_until", scope="session")
def _wait_until() -> Callable[..., Any]:
    return wait_until


@pytest.fixture(name="free_port", scope="session")
def _free_port() -> Callable[[], int]:
    return free_port
