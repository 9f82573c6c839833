"""`autotune demo`: the same seeded chats twice, with static knobs and with the loop, and a report of both."""

import asyncio
import json
import logging
import os
import platform
import signal
import threading
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import httpx
from rich.console import Console

from kvpilot.agent.control.audit import AuditLog
from kvpilot.agent.control.client import EngineClient, EngineUnavailableError
from kvpilot.agent.control.controller import Controller, Decision, Mode
from kvpilot.agent.control.nouns import Inputs
from kvpilot.agent.demo.load import LoadRun
from kvpilot.agent.demo.recording import Recording
from kvpilot.agent.demo.report import write_report
from kvpilot.agent.demo.table import LiveTable
from kvpilot.agent.demo.traffic import PHASES, Session, make_sessions
from kvpilot.agent.guard import GuardLimits, Memory, intervals
from kvpilot.agent.launch import LaunchError, ServerProcess, launched
from kvpilot.agent.policies.threshold import ThresholdPolicy
from kvpilot.engine.config import EngineConfig
from kvpilot.engine.errors import ConfigError

SAMPLE_SECONDS = 1.0
WARM_UP_REQUESTS = 4
STARVATION_SECONDS = 10.0  # the default of 300 is for hours of traffic, not for minutes


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    model: str = "smollm2"
    out: Path = Path("runs/demo")
    seconds_per_phase: float = 15.0
    drain_seconds: float = 10.0  # after the last phase, for the requests under way
    pool_mb: int = 48  # about 2,100 tokens of SmolLM2-135M in bf16: small enough that memory decides
    interval_seconds: float = 2.0  # of the loop; production takes 10 s or more
    seed: int = 1

    def __post_init__(self) -> None:
        if self.seconds_per_phase < 1:
            raise ConfigError(f"seconds_per_phase={self.seconds_per_phase:g} is invalid: expected >= 1")
        if self.pool_mb < 8:
            raise ConfigError(f"pool_mb={self.pool_mb} is invalid: expected >= 8, or no prompt fits")


def run_demo(config: DemoConfig) -> int:
    """Both runs and the report; the exit code. A run that breaks off still leaves a report that says so."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also where SIGINT is ignored, as under nohup
    config.out.mkdir(parents=True, exist_ok=True)
    (config.out / "audit.jsonl").unlink(missing_ok=True)  # of an earlier demo
    log_to_file(config.out / "loop.log")
    console = Console()
    sessions = make_sessions(PHASES, config.seconds_per_phase, config.seed)
    recordings = [Recording(name="static"), Recording(name="tuned")]
    problem: str | None = None
    try:
        for recording in recordings:
            table = LiveTable(console, config.seconds_per_phase, recordings, recording)
            _measure(config, recording, sessions, table)
    except KeyboardInterrupt:
        problem = "Interrupted: this report shows what had been measured until then."
    except (LaunchError, EngineUnavailableError) as error:
        problem = f"Broken off: {error}"
    report = _write(config, recordings, problem)
    console.print(f"\nreport: [bold]{report}[/bold]   raw series: {config.out / 'run.json'}")
    if problem:
        console.print(problem, style="red", markup=False)
    return 1 if problem else 0


def log_to_file(path: Path) -> None:
    """The loop's log lines would tear the live table."""
    handler = logging.FileHandler(path, mode="w", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("kvpilot")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)


def _measure(config: DemoConfig, recording: Recording, sessions: list[Session], table: LiveTable) -> None:
    """One run on a fresh server."""
    table.say(f"{recording.name}: starting the engine (the first time it fetches the model)")
    serve = ["--model", config.model, "--pool-mb", str(config.pool_mb)]
    serve += ["--starvation-seconds", str(STARVATION_SECONDS)]
    with launched(serve, directory=config.out, name=recording.name) as server:
        model = _warm_up(server)
        table.say(f"{recording.name}: {len(sessions)} chats on {server.url}")
        with table:
            asyncio.run(_drive(config, recording, sessions, server, model, table))


def _warm_up(server: ServerProcess) -> str:
    """First requests pay for allocations and thread pools; they are not measured. Returns the model's name."""
    with httpx.Client(base_url=server.url, timeout=120.0, trust_env=False) as http:
        try:
            model = http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
            for _ in range(WARM_UP_REQUESTS):
                body = {"model": model, "prompt": "Hello there, workshop. " * 8, "max_tokens": 16}
                http.post("/v1/completions", json=body).raise_for_status()
        except httpx.HTTPError as error:
            server.check_alive()
            raise EngineUnavailableError(f"the warm-up request failed: {error}\n{server.tail()}") from error
    return model


async def _drive(
    config: DemoConfig,
    recording: Recording,
    sessions: list[Session],
    server: ServerProcess,
    model: str,
    table: LiveTable,
) -> None:
    end = len(PHASES) * config.seconds_per_phase
    load = LoadRun(url=server.url, model=model, end_seconds=end)
    recording.started, recording.results = load.started, load.results
    stop = threading.Event()
    loop = threading.Thread(target=_tune, args=(config, recording, server, stop), daemon=True)
    if recording.name == "tuned":
        loop.start()
    driving = asyncio.create_task(load.drive(sessions, config.drain_seconds))
    watching = asyncio.create_task(_watch(recording, server, table))
    try:
        await asyncio.wait({driving, watching}, return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()  # raises: watching never ends by itself
        driving.result()
        server.check_alive()
        recording.finished = True
    finally:
        stop.set()
        for task in (driving, watching):
            task.cancel()
        await asyncio.gather(driving, watching, return_exceptions=True)


def demo_limits(interval_seconds: float) -> GuardLimits:
    """Minutes in the place of hours: a change at each decision, and no long cool-down. Nothing is on trial: phases of
    a few seconds are too short to judge a change by."""
    return GuardLimits(
        min_interval_seconds=intervals(interval_seconds * 0.9),
        budget_steps_per_minute=60 / interval_seconds,
        flip_seconds=10 * interval_seconds,
    )


def _tune(config: DemoConfig, recording: Recording, server: ServerProcess, stop: threading.Event) -> None:
    """The loop of `autotune run`, in mode auto, at a demo's pace."""

    def note(decision: Decision, memory: Memory, inputs: Inputs | None) -> None:
        recording.decisions.append((time.monotonic() - recording.started, decision))

    client = EngineClient(url=server.url, admin_url=server.admin_url, token=server.token)
    Controller(
        engine=client,
        policy=ThresholdPolicy(),
        audit=AuditLog(config.out / "audit.jsonl"),
        mode=Mode.AUTO,
        limits=demo_limits(config.interval_seconds),
        window_seconds=config.interval_seconds,
        listener=note,
    ).run(stop, config.interval_seconds)
    client.close()


async def _watch(recording: Recording, server: ServerProcess, table: LiveTable) -> None:
    """Samples the engine until cancelled; LaunchError if it dies."""
    client = EngineClient(
        url=server.url, admin_url=server.admin_url, token=server.token, timeout_seconds=10.0
    )
    try:
        while True:
            try:
                recording.add(await asyncio.to_thread(client.scrape))
            except EngineUnavailableError:
                server.check_alive()
                raise
            table.update()
            await asyncio.sleep(SAMPLE_SECONDS)
    finally:
        client.close()


def _write(config: DemoConfig, recordings: list[Recording], problem: str | None) -> Path:
    data = report_data(config, recordings, problem)
    (config.out / "run.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
    return write_report(data, config.out / "report.html")


def report_data(config: DemoConfig, recordings: list[Recording], problem: str | None) -> dict[str, object]:
    """What run.json holds, and all that the report is made from."""
    return {
        "problem": problem,
        "version": version("kvpilot"),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}",
        "cores": os.cpu_count(),
        "page_size": EngineConfig().page_size,
        "config": {**asdict(config), "out": config.out.name},
        "phases": [asdict(phase) for phase in PHASES],
        "runs": [recording.as_dict() for recording in recordings],
    }
