"""A trace against the simulator."""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from kvpilot.engine.config import EngineConfig
from kvpilot.engine.errors import ConfigError
from kvpilot.engine.kv.eviction import ORACLE
from kvpilot.engine.request import Request
from kvpilot.engine.stats import StatsSnapshot
from kvpilot.env.replay.limits import check_costs, check_number, check_pool
from kvpilot.env.replay.result import CUT_OFF, DONE, FAILED, REFUSED, REQUEST_COLUMNS, ReplayResult
from kvpilot.env.replay.summary import summarize
from kvpilot.env.replay.windows import window_columns
from kvpilot.env.simulator.belady import BeladyPolicy
from kvpilot.env.simulator.closed_loop import ClosedLoopSimulation
from kvpilot.env.simulator.latency import LatencyProfile, ProfiledModel
from kvpilot.env.simulator.simulation import Simulation
from kvpilot.env.slo import Slo
from kvpilot.env.traces.trace import Trace


@dataclass(frozen=True, kw_only=True)
class SimReplay:
    """What to simulate. `engine.eviction` may be belady, in open loop.

    `users` closes the loop: so many users take the trace's sessions one by one. `end_seconds` stops the clock.
    """

    profile: LatencyProfile
    engine: EngineConfig
    slo: Slo
    window_seconds: float = 10.0
    users: int | None = None
    end_seconds: float = inf
    seed: int = 0

    def __post_init__(self) -> None:
        check_number(self.window_seconds, name="window_seconds", above=0.0)
        check_number(self.end_seconds, name="end_seconds", above=0.0, may_be_inf=True)
        check_number(self.seed, name="seed", low=0)
        check_costs(self.profile, self.engine.ladder)
        if self.profile.model is not None:
            check_pool(self.engine, self.profile.model)
        if self.users is not None and self.users < 1:
            raise ConfigError(f"users={self.users!r} is invalid: expected >= 1")
        if self.users is not None and self.engine.eviction == ORACLE:
            raise ConfigError("eviction='belady' needs arrivals known beforehand: not in closed loop (users)")

    @property
    def model(self) -> ProfiledModel:
        return self.profile.needed_model

    @property
    def quality_loss(self) -> dict[str, float]:
        return self.profile.best_known_loss


def make_simulation(trace: Trace, replay: SimReplay) -> Simulation:
    """The simulation at its beginning."""
    page_size = replay.engine.page_size
    trace = trace if trace.block_size == page_size else trace.with_block_size(page_size)
    shape, profile = replay.model.page_shape(page_size), replay.profile.for_page_size(page_size)
    options: dict[str, Any] = {
        "model_max_len": replay.model.max_len,
        "quality_loss": replay.quality_loss,
    }
    if replay.users is not None:
        return ClosedLoopSimulation(
            trace, replay.engine, shape, profile, users=replay.users, seed=replay.seed, **options
        )
    if replay.engine.eviction == ORACLE:
        fits = trace.select(trace.prompt_tokens < replay.model.max_len)
        options["policy"] = BeladyPolicy(fits)
    return Simulation(trace, replay.engine, shape, profile, **options)


def replay_simulated(
    trace: Trace,
    replay: SimReplay,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> ReplayResult:
    """Runs until all is answered, `end_seconds` is reached or `is_stopped`; `progress` gets requests ended."""
    started = time.perf_counter()
    simulation = make_simulation(trace, replay)
    snapshots = [simulation.engine.snapshot()]
    while not simulation.is_done and simulation.clock.now < replay.end_seconds and not is_stopped():
        simulation.run(until=min(snapshots[-1].time + replay.window_seconds, replay.end_seconds))
        snapshots.append(simulation.engine.snapshot())
        progress(len(simulation.finished) + len(simulation.refused), len(trace))
    return _result(simulation, replay, snapshots, time.perf_counter() - started)


def _result(
    simulation: Simulation, replay: SimReplay, snapshots: list[StatsSnapshot], took_seconds: float
) -> ReplayResult:
    trace = simulation.trace
    requests = _columns(_request_rows(simulation))
    windows = window_columns(snapshots)
    return ReplayResult(
        target="sim",
        trace={
            "provenance": list(trace.provenance),
            "num_requests": len(trace),
            "block_size": trace.block_size,
        },
        config={
            "engine": asdict(replay.engine),
            "profile": {"name": replay.profile.name, "origin": replay.profile.origin},
            "model": asdict(replay.model),
            "quality_loss": replay.quality_loss,
            "users": replay.users,
        },
        slo=replay.slo,
        requests=requests,
        windows=windows,
        summary=summarize(requests, windows, replay.slo, reasons={REFUSED: refusal_reasons(simulation)}),
        provenance={
            "simulated_in_seconds": took_seconds,
            "requests_simulated_per_second": len(requests["row"]) / took_seconds,
        },
        is_partial=not simulation.is_done,
    )


def refusal_reasons(simulation: Simulation) -> Counter[str]:
    """Requests refused, by why: the engine's own words name each prompt's length."""
    limit = simulation.engine.max_model_len
    too_long = f"prompt too long: {limit:,} tokens or more (what model and pool hold)"
    queue_full = f"queue full: {simulation.engine.config.max_waiting:,} requests waiting"
    reasons: Counter[str] = Counter()
    for row, reason in simulation.refused:
        is_long = simulation.trace.prompt_tokens[row] >= limit
        is_full = reason.startswith("the queue is full")
        reasons[too_long if is_long else queue_full if is_full else reason] += 1
    return reasons


def _request_rows(simulation: Simulation) -> Iterable[tuple[Any, ...]]:
    """In order of arrival; what has not arrived is left out."""
    rows = {
        simulation.row_of(request): request_row(simulation.trace, request) for request in simulation.finished
    }
    for refusal in simulation.refused:
        rows[refusal.row] = _bare_row(simulation, refusal.row, REFUSED)
    scheduler = simulation.engine.scheduler
    for request in (*scheduler.running, *scheduler.waiting):
        row = simulation.row_of(request)
        rows[row] = _bare_row(simulation, row, CUT_OFF)
    return sorted(rows.values(), key=lambda row: (row[3], row[0]))


def request_row(trace: Trace, request: Request) -> tuple[Any, ...]:
    """REQUEST_COLUMNS of a request that ended."""
    row, arrival = Simulation.row_of(request), request.arrival_time
    return (
        row,
        int(trace.session[row]),
        int(trace.turn[row]),
        arrival,
        _since(arrival, request.first_admission_time),
        _since(arrival, request.first_token_time),
        request.mean_gap_seconds,
        _since(arrival, request.finish_time),
        request.num_prompt_tokens,
        request.num_cached,
        request.num_output_tokens,
        DONE if request.is_answered else FAILED,
    )


def _since(arrival: float, time: float | None) -> float | None:
    return None if time is None else time - arrival


def _bare_row(simulation: Simulation, row: int, status: str) -> tuple[Any, ...]:
    trace = simulation.trace
    known = (row, int(trace.session[row]), int(trace.turn[row]), simulation.arrival_of(row))
    return (*known, None, None, None, None, int(trace.prompt_tokens[row]), 0, 0, status)


def _columns(rows: Iterable[tuple[Any, ...]]) -> dict[str, list[Any]]:
    table = list(rows)
    return {name: [row[k] for row in table] for k, name in enumerate(REQUEST_COLUMNS)}
