"""One run of everything, all real: engine, Prometheus with our rules, sidecar, traffic."""

import asyncio
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from kvpilot.agent.demo.load import LoadRun
from kvpilot.agent.demo.traffic import Phase, make_sessions
from kvpilot.agent.launch import ServerProcess, launched
from kvpilot.dashboards.rules import Timing, render_rules
from kvpilot.engine.stats import StatsSnapshot, StatsWindow
from kvpilot.exporter.promql import PromSource
from kvpilot.exporter.scrape import Scraper

AUTOTUNE = [sys.executable, "-P", "-m", "kvpilot.agent.cli"]
POD = "chat-0"
TIMING = Timing(
    window_seconds=15, hold_seconds=4, silence_seconds=60
)  # the rules' defaults are for production
SERVE = [
    "--model",
    "smollm2",
    "--pool-mb",
    "32",
    "--starvation-seconds",
    "20",
    "--max-batch",
    "8",
    "--ttl",
    "1",
]
CHATS = Phase(
    name="chats",
    sessions_per_second=1.0,
    arrival_share=0.8,
    turns=3,
    first_words=60,
    answer_tokens=20,
    think_seconds=2.0,
    color="",
)
FLOOD = Phase(
    name="flood",
    sessions_per_second=12.0,
    arrival_share=0.4,
    turns=1,
    first_words=250,
    answer_tokens=30,
    think_seconds=0.0,
    color="",
)


class World:
    """What runs, and what was noted of it while it ran."""

    def __init__(
        self,
        engine: ServerProcess,
        prometheus: Any,
        sidecar: "subprocess.Popen[bytes]",
        agent_url: str,
        directory: Path,
    ) -> None:
        self.engine, self.prometheus, self.sidecar = engine, prometheus, sidecar
        self.agent_url, self.directory = agent_url, directory
        self.audit = directory / "audit.jsonl"
        self.trace = directory / "traffic.jsonl"
        self.seen_alerts: dict[str, set[str]] = {}  # alert -> states that it was in
        self.queries: dict[tuple[str, str], list[dict[str, Any]]] = {}  # (panel, expression) -> result
        self.unanswered = 0
        self.answered = 0
        self.windows: list[StatsWindow] = []  # asked of Prometheus
        self.scrapes: list[StatsSnapshot] = []  # made directly at the same time
        self.resident_bytes = 0
        self.strangers_batch = 0  # what someone else set max_batch to
        self.spans: list[Any] = []  # of engine and sidecar, over OTLP

    def admin(self, method: str, **options: Any) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.engine.token}"}
        url = f"{self.engine.admin_url}/admin/knobs"
        answer = httpx.request(method, url, headers=headers, trust_env=False, **options)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def autotune(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([*AUTOTUNE, *arguments], capture_output=True, text=True, timeout=150)

    def agent_metric(self, name: str) -> float:
        """The sum over its labels, straight from the sidecar."""
        text = httpx.get(f"{self.agent_url}/metrics", trust_env=False).text
        lines = [line for line in text.splitlines() if re.match(rf"kvpilot_agent_{name}[{{ ]", line)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def note_alerts(self) -> dict[str, str]:
        states = self.prometheus.alerts()
        for name, state in states.items():
            self.seen_alerts.setdefault(name, set()).add(state)
        return states

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit.read_text(encoding="utf-8").splitlines()]

    def chat(self, phase: Phase, seconds: float, *, seed: int, drain_seconds: float) -> None:
        """Sends a phase of chats and waits for the answers."""
        run = LoadRun(url=self.engine.url, model="smollm2", end_seconds=seconds)
        asyncio.run(run.drive(make_sessions((phase,), seconds, seed), drain_seconds))
        counts = run.counts()
        self.answered += counts["done"]
        self.unanswered += sum(counts.values()) - counts["done"]

    def ask_all_panels(self, boards: dict[str, dict[str, Any]]) -> None:
        """Every query of every dashboard, over all that has happened; those that had data are not asked again."""
        for board in boards.values():
            for panel in board["panels"]:
                for target in panel.get("targets", ()):
                    expression = target["expr"].replace("$__rate_interval", "10m")
                    expression = re.sub(r"\$\w+", ".*", expression)
                    key = f"{board['title']} / {panel['title']}", target["expr"]
                    if not self.has_data(key):
                        self.queries[key] = self.prometheus.query(expression)

    def has_data(self, key: tuple[str, str]) -> bool:
        """The panel's query gave at least one number."""
        return any(math.isfinite(float(one["value"][1])) for one in self.queries.get(key, ()))


@contextmanager
def sidecar(
    engine: ServerProcess, prometheus_url: str, listen: str, directory: Path
) -> Iterator[subprocess.Popen]:
    config = {
        "source": "prometheus",
        "prometheus": {"url": prometheus_url, "selector": {"pod": POD, "job": "kvpilot-engine"}},
        "url": engine.url,
        "admin_url": engine.admin_url,
        "token_file": str(engine.token_file),
        "interval_seconds": 1.5,
        "decision_seconds": 3.0,
        "audit": str(directory / "audit.jsonl"),
        "state": str(directory / "state.json"),
        "kill_file": str(directory / "kill"),
        "listen": listen,
        "slo": {"ttft_p99_seconds": 8.0},
        "guard": {
            "min_change_seconds": 3.0,
            "settle_seconds": 4.0,
            "reuse_seconds": 4.0,
            "freeze_seconds": 6.0,
        },
        "counterfactual": {
            "trace": str(directory / "traffic.jsonl"),
            "every_seconds": 15.0,
            "window_seconds": 60.0,
        },
    }
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    with (directory / "sidecar.log").open("wb") as log:
        command = [*AUTOTUNE, "run", "--mode", "auto", "--config", str(path)]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


class Scrapes:
    """Direct scrapes in the background, a few per second."""

    def __init__(self, url: str) -> None:
        self.snapshots: list[StatsSnapshot] = []
        self._stop = threading.Event()
        self._scraper = Scraper(f"{url}/metrics", timeout_seconds=20)
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.wait(0.2):
            self.snapshots.append(self._scraper.snapshot())

    def __enter__(self) -> "Scrapes":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._scraper.close()


@pytest.fixture(scope="module")
def world(
    start_prometheus: Callable[..., Any],
    wait_until: Callable[..., Any],
    free_port: Callable[[], int],
    boards: dict[str, dict[str, Any]],
    start_collector: Callable[[], Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[World]:
    collector = start_collector()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)  # of the processes started below
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "500")
        yield from _run(start_prometheus, wait_until, free_port, boards, collector.spans, tmp_path_factory)


def _run(
    start_prometheus: Callable[..., Any],
    wait_until: Callable[..., Any],
    free_port: Callable[[], int],
    boards: dict[str, dict[str, Any]],
    spans: list[Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("e2e")
    rules = directory / "rules.yml"
    rules.write_text(render_rules(TIMING), encoding="utf-8")
    listen = f"127.0.0.1:{free_port()}"
    serve = [*SERVE, "--record", str(directory / "traffic.jsonl")]
    with launched(serve, directory=directory) as engine:
        prometheus = start_prometheus(
            targets={
                "kvpilot-engine": [(engine.url.removeprefix("http://"), {"pod": POD})],
                "kvpilot-agent": [(listen, {"pod": POD})],
            },
            rule_files=(rules,),
        )
        with sidecar(engine, prometheus.url, listen, directory) as process:
            world = World(engine, prometheus, process, f"http://{listen}", directory)
            world.spans = spans
            _play(world, boards, wait_until)
            yield world


def _play(world: World, boards: dict[str, dict[str, Any]], wait_until: Callable[..., Any]) -> None:
    """Chats, the same replayed, a flood, silence, a stranger's hand on the knobs, the kill switch."""
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {text}", file=sys.stderr)

    say("chats")
    world.chat(CHATS, 15.0, seed=1, drain_seconds=30)
    say("the recorded traffic again, with direct scrapes beside Prometheus")
    recorded = world.directory / "recorded.jsonl"
    recorded.write_bytes(world.trace.read_bytes())  # which grows on
    out = str(world.directory / "replay.json")
    with Scrapes(world.engine.url) as scrapes:
        done = world.autotune("replay", str(recorded), "--on", world.engine.url, "--out", out)
        source = PromSource(world.prometheus.url, selector={"pod": POD, "job": "kvpilot-engine"})
        world.windows = [source.window(seconds) for seconds in (5.0, 10.0)]
        source.close()
    assert done.returncode == 0, done.stdout + done.stderr
    world.scrapes = scrapes.snapshots
    say("a flood")
    flood = threading.Thread(target=lambda: world.chat(FLOOD, 12.0, seed=2, drain_seconds=90))
    flood.start()
    while flood.is_alive():
        world.note_alerts()
        world.ask_all_panels(boards)
        time.sleep(0.5)
    flood.join()
    say(f"the flood is over: {world.seen_alerts}")
    wait_until(lambda: world.agent_metric("counterfactual") > 0, seconds=60, what="a counterfactual")
    time.sleep(2)
    world.ask_all_panels(boards)
    say("silence")
    wait_until(
        lambda: not {"KVPilotTtftBeyondSlo", "KVPilotQueueBeyondSlo"} & set(world.note_alerts()),
        seconds=60,
        what="the SLO alerts clear",
    )
    say("someone else sets a knob")
    world.strangers_batch = 5 if world.admin("GET")["knobs"]["max_batch"] != 5 else 7
    world.admin("PATCH", json={"knobs": {"max_batch": world.strangers_batch}})
    wait_until(
        lambda: world.note_alerts().get("KVPilotKnobsChangedByOthers") == "firing",
        seconds=40,
        what="the stranger's alert",
    )
    wait_until(lambda: "KVPilotKnobsChangedByOthers" not in world.note_alerts(), seconds=60, what="it clears")
    say("the kill switch")
    (world.directory / "kill").touch()
    wait_until(
        lambda: any("kill-switch" in json.dumps(record) for record in world.records()), what="it is killed"
    )
    world.resident_bytes = _resident_bytes(world.sidecar.pid)
    say("done")


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
