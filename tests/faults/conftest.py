"""The simulated engine (the engine itself on a virtual clock) behind the real admin API and exporter over HTTP, the
loop beside it on the same clock, and somebody who stands between them."""

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import uvicorn
from fastapi import Request, Response
from prometheus_client import CollectorRegistry

from kvpilot.agent.control.audit import AuditLog, read_audit
from kvpilot.agent.control.client import EngineClient
from kvpilot.agent.control.config import RunSettings
from kvpilot.agent.control.controller import Controller
from kvpilot.agent.control.in_force import guard_limits
from kvpilot.agent.control.nouns import Decision, Mode
from kvpilot.agent.control.replay import replay
from kvpilot.agent.control.state import StateFile
from kvpilot.agent.guard import Reason
from kvpilot.agent.guard.limits import limits_as_dict
from kvpilot.engine.config import Knobs
from kvpilot.engine.server.admin import create_admin_app
from kvpilot.engine.stats import StatsWindow
from kvpilot.env.observation import quantile
from kvpilot.env.policy import Proposal
from kvpilot.env.simulator.latency import load_profile
from kvpilot.env.simulator.simulation import Simulation
from kvpilot.env.traces.readers import read_trace
from kvpilot.exporter.collector import EngineCollector, metrics_source

TOKEN = "a-token-for-tests-only"
INTERVAL, DECISION, SETTLE = 15.0, 60.0, 60.0
ALLOWED_OUTSIDE = DECISION + SETTLE  # seconds at a stretch, whatever is done to the loop
SLO_TTFT = 2.0
START = Knobs(ttl_seconds=60.0, size_factor=0.3, max_batch=16, kv_level=1)


def write_traffic(path, *, seconds: float, users: int, seed: int = 1) -> None:
    """Chats of a few turns, each prompt the one before and more."""
    rng = np.random.default_rng(seed)
    lines, next_block = [], 1
    for user in range(users):
        arrival, session = rng.uniform(0, 40), 0
        while arrival < seconds:
            blocks = list(range(next_block, next_block + 200))
            next_block += 200
            for turn in range(1, int(rng.integers(3, 9))):
                prompt = 320 + 160 * turn
                record = {
                    "arrival": round(float(arrival), 3),
                    "prompt_tokens": prompt,
                    "output_tokens": 96,
                    "block_size": 32,
                    "blocks": blocks[: prompt // 32],
                    "session": user * 10_000 + session,
                    "turn": turn,
                }
                lines.append(record)
                arrival += float(rng.exponential(25.0)) + 5.0
            session += 1
            arrival += float(rng.exponential(20.0))
    lines = [line for line in lines if line["arrival"] < seconds]
    path.write_text(
        "".join(json.dumps(line) + "\n" for line in sorted(lines, key=lambda one: one["arrival"]))
    )


class World:
    """`metrics` and `on_patch` are where an attack puts itself; `outside` are the seconds beyond the SLO, one entry
    per stretch."""

    def __init__(self, folder, *, seconds: float = 900.0, users: int = 110, pool_mb: int = 1024) -> None:
        self.folder = folder
        write_traffic(folder / "traffic.jsonl", seconds=seconds, users=users)
        self.trace = read_trace(folder / "traffic.jsonl")
        profile = load_profile(str(Path(__file__).with_name("profile.json")))
        assert profile.model is not None
        config = profile.engine_config(pool_bytes=pool_mb << 20, max_batch_ceiling=64, knobs=START)
        self.sim = Simulation(
            self.trace,
            config,
            profile.model.page_shape(config.page_size),
            profile,
            model_max_len=profile.model.max_len,
            quality_loss={"bf16": 0.0, "int8": 0.0001, "int4": 0.004},
        )
        self.engine = self.sim.engine
        self.snapshot = self.engine.snapshot  # what the exporter shows
        self.metrics: Callable[[bytes], bytes] = lambda text: text
        self.on_patch: Callable[[dict], dict] = lambda body: body
        self.delay_seconds = 0.0
        self.outside: list[float] = []
        self.decisions: list[Decision] = []
        self._last = self.engine.snapshot()
        self._was_outside = False

    @property
    def now(self) -> float:
        return self.sim.clock.now

    @property
    def knobs(self) -> dict:
        return self.engine.knob_state().requested.as_dict()

    @property
    def lost(self) -> int:
        """Requests neither answered nor under way nor still to come."""
        scheduler = self.engine.scheduler
        here = len(self.sim.finished) + len(scheduler.running) + len(scheduler.waiting)
        return self.sim._next_row - here

    def app(self):
        app = create_admin_app(SimpleNamespace(engine=self.engine), TOKEN)  # pyright: ignore[reportArgumentType]
        registry = CollectorRegistry()
        EngineCollector(lambda: self.snapshot(), model_name="sim", info={}, registry=registry)
        source = metrics_source(registry)

        @app.get("/metrics")
        def metrics() -> Response:
            text, content_type = source()
            return Response(self.metrics(text), media_type=content_type)

        @app.middleware("http")
        async def between(request: Request, call_next):
            if self.delay_seconds:
                time.sleep(self.delay_seconds)
            if request.method == "PATCH":
                body = self.on_patch(json.loads(await request.body()))
                request._body = json.dumps(body).encode()
            return await call_next(request)

        return app

    def advance(self, seconds: float) -> None:
        """Traffic goes on; seconds beyond the SLO are counted by what the engine itself knows."""
        self.sim.run(until=self.now + seconds)
        snapshot = self.engine.snapshot()
        ttft = quantile(StatsWindow(start=self._last, end=snapshot), "time_to_first_token_seconds", 0.99)
        waited = snapshot.values["waiting_oldest_seconds", ()]  # unanswered so far
        is_outside = max(waited, ttft or 0.0) > SLO_TTFT
        if is_outside:
            self.outside = [*self.outside, 0.0] if not self._was_outside else self.outside
            self.outside[-1] += seconds
        self._was_outside, self._last = is_outside, snapshot

    def play(self, controller: Controller, seconds: float) -> list[Decision]:
        """The loop beside the traffic for so long; the decisions of this stretch."""
        first = len(self.decisions)
        until = self.now + seconds
        while self.now < until:
            self.advance(INTERVAL)
            self.decisions.append(controller.tick())
            self.engine.check_integrity()
        return self.decisions[first:]

    def check(self) -> None:
        """What holds whatever has been done."""
        assert self.lost == 0
        assert not self.sim.refused
        assert max(self.outside, default=0.0) <= ALLOWED_OUTSIDE, f"outside the SLO: {self.outside}"
        for decision in self.decisions:
            assert all(math.isfinite(value) for value in decision.knobs.values())


class Wishes:
    """A policy that asks for what `choose` says."""

    name = "wishes"

    def __init__(self, choose: Callable[[int], dict]) -> None:
        self.choose, self.calls = choose, 0

    def reset(self) -> None:
        pass

    def propose(self, observation, knobs, bounds) -> Proposal:
        self.calls += 1
        return Proposal(self.choose(self.calls), "as the test says")


@pytest.fixture
def wishes() -> type[Wishes]:
    return Wishes


@pytest.fixture
def world(tmp_path) -> Iterator[World]:
    with running(World(tmp_path)) as world:
        yield world


@contextmanager
def running(world: World) -> Iterator[World]:
    config = uvicorn.Config(world.app(), port=0, log_level="error", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    world.url = f"http://{host}:{port}"  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield world
    finally:
        server.should_exit = True
        thread.join(20)


@pytest.fixture
def make_loop(world, tmp_path) -> Iterator[Callable[..., Controller]]:
    """A loop with the limits that an operator gets by default, on the world's clock."""
    clients: list[EngineClient] = []

    def make(
        policy, *, audit=None, limits=None, slo_ttft: float = SLO_TTFT, timeout: float = 10.0, **options
    ) -> Controller:
        client = EngineClient(url=world.url, admin_url=world.url, token=TOKEN, timeout_seconds=timeout)
        clients.append(client)
        settings = RunSettings(slo={"ttft_p99_seconds": slo_ttft})  # pyright: ignore[reportArgumentType]
        log = AuditLog(audit or tmp_path / "audit.jsonl")
        limits = limits or guard_limits(settings)
        setup = {"kind": "setup", "is_start": True, "policy_spec": "threshold", "fallback": "hold"}
        log.write({**setup, "policy_hash": load_hash("threshold"), "limits": limits_as_dict(limits)})
        options = {"mode": Mode.AUTO, "state": StateFile(tmp_path / "state.json"), **options}
        return Controller(
            engine=client,
            policy=policy,
            audit=log,
            limits=limits,
            window_seconds=DECISION,
            decide_every=round(DECISION / INTERVAL),
            clock=lambda: world.now,
            unix_clock=lambda: 1.7e9 + world.now,
            **options,
        )

    yield make
    for client in clients:
        client.close()


def load_hash(spec: str) -> str:
    from kvpilot.agent.control.loaded_policy import load

    return load(spec).digest


@pytest.fixture
def reasons() -> Callable[[list[Decision]], set[Reason]]:
    return lambda decisions: {refusal.reason for one in decisions for refusal in one.refusals}


@pytest.fixture
def replayed(tmp_path) -> Callable:
    return lambda: replay(read_audit(tmp_path / "audit.jsonl"))


@pytest.fixture
def human(world) -> Callable[[dict], httpx.Response]:
    """Somebody with the token and curl."""

    def patch(knobs: dict) -> httpx.Response:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        return httpx.patch(
            f"{world.url}/admin/knobs", json={"knobs": knobs}, headers=headers, trust_env=False
        )

    return patch
