"""What each knob moves: sweeps of one knob at a time in the simulator, the others where they are best."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from kvpilot.agent.jobs.workers import StoppedError, Workers
from kvpilot.engine.config import KNOB_NAMES, EngineConfig, Knobs, validate_knobs
from kvpilot.engine.errors import KVPilotError
from kvpilot.env.replay.sim import SimReplay, replay_simulated
from kvpilot.env.traces.trace import Trace

START = {"ttl_seconds": 60.0, "size_factor": 0.5}  # at 0 neither of the two does anything alone
HIT_WEIGHT = 0.3
MOVES = 0.1  # a metric moves if it changes by more than so much of its largest value

METRICS: dict[str, tuple[str, ...]] = {  # label -> path into the summary
    "hit rate": ("hit_rate",),
    "TTFT p50": ("ttft_seconds", "p50"),
    "TTFT p99": ("ttft_seconds", "p99"),
    "inter-token p99": ("inter_token_seconds", "p99"),
    "answer mean": ("e2e_seconds", "mean"),
    "goodput": ("goodput_share",),
    "quality loss": ("quality_loss",),
    "evictions": ("evictions",),
    "preemptions": ("preemptions",),
}


@dataclass(frozen=True, kw_only=True)
class Point:
    """One simulation: `knob` was set to `value`, the others as `knobs` says."""

    knob: str
    value: float
    knobs: dict[str, float]
    summary: dict[str, Any]

    def metric(self, label: str) -> float:
        value: Any = self.summary
        for name in METRICS[label]:
            value = value.get(name, 0.0)
        return float(sum(value.values()) if isinstance(value, dict) else value)


class Movement(NamedTuple):
    """Lowest and highest value of a metric over a sweep, and the change as a share of the highest."""

    low: float
    high: float
    change: float


@dataclass
class Sensitivity:
    """Sweeps of the last round, by knob, around `best`.

    Where it was stopped, `is_partial`, and `unfinished` has the knobs whose sweeps are no base for a conclusion:
    values simulated, and of how many.
    """

    best: dict[str, float]
    sweeps: dict[str, list[Point]] = field(default_factory=dict)
    is_partial: bool = False
    unfinished: dict[str, tuple[int, int]] = field(default_factory=dict)

    def movement(self, knob: str, label: str) -> Movement:
        values = [v for point in self.sweeps[knob] if (v := point.metric(label)) == v]
        low, high = min(values, default=0.0), max(values, default=0.0)
        return Movement(low, high, (high - low) / high if high > 0 else 0.0)


def grid_of(knob: str, config: EngineConfig) -> list[float]:
    """The values that a sweep tries, in order."""
    match knob:
        case "ttl_seconds":
            return [0.0, 5.0, 20.0, 60.0, 180.0, 600.0, 3600.0]
        case "size_factor":
            return [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
        case "max_batch":
            ceiling = config.max_batch_ceiling
            return [float(1 << k) for k in range(ceiling.bit_length()) if 1 << k <= ceiling]
        case _:
            return [float(level) for level in range(len(config.ladder))]


def score(summary: dict[str, Any], quality_weight: float) -> float:
    """What `best` means: good requests and hits, less what the quality costs."""
    loss = summary.get("quality_loss", 0.0)
    hits, good = summary["hit_rate"], summary["goodput_share"]
    return good + HIT_WEIGHT * hits - quality_weight * (loss if loss == loss else 0.0)


def sweep(
    trace: Trace,
    replay: SimReplay,
    *,
    at: dict[str, float] | None,
    rounds: int,
    quality_weight: float,
    processes: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Sensitivity:
    """`at` fixes where the other knobs stand; without it each round starts at the best of the one before.

    Where it is stopped, the sweeps hold what was done. Raises KnobInvalidError for knobs out of bounds, JobError or
    WorkerDiedError for a simulation that fails.
    """
    config = replay.engine
    best: dict[str, float] = {**config.knobs.as_dict(), **START, **(at or {})}
    validate_knobs(best, config)
    rounds = 1 if at is not None else rounds
    total = rounds * sum(len(grid_of(knob, config)) for knob in KNOB_NAMES)
    result, done = Sensitivity(best), 0

    def on_done(index: int, point: Point | KVPilotError) -> None:
        nonlocal done
        if isinstance(point, KVPilotError):
            raise point
        result.sweeps[point.knob].append(point)
        done += 1
        progress(done, total)

    page_size = config.page_size
    paged = trace if trace.block_size == page_size else trace.with_block_size(page_size)
    with Workers(_Simulation(paged, replay), processes) as workers:
        for _ in range(rounds):
            result = Sensitivity(dict(best), {knob: [] for knob in KNOB_NAMES})
            trials = [
                _Trial(knob, value, result.best) for knob in KNOB_NAMES for value in grid_of(knob, config)
            ]
            with suppress(StoppedError):
                workers.run(trials, on_done=on_done, is_stopped=is_stopped)
            for points in result.sweeps.values():
                points.sort(key=lambda point: point.value)
            if is_stopped():
                break
            for knob, points in result.sweeps.items():
                best[knob] = max(points, key=lambda p: score(p.summary, quality_weight)).value
    sizes = {knob: len(grid_of(knob, config)) for knob in KNOB_NAMES}
    counts = {knob: len(points) for knob, points in result.sweeps.items()}
    result.is_partial = done < total
    result.unfinished = {knob: (n, sizes[knob]) for knob, n in counts.items() if n < sizes[knob]}
    result.sweeps = {knob: points for knob, points in result.sweeps.items() if points}
    return result


class _Trial(NamedTuple):
    """`knob` is set to `value`, the other knobs as `others` says."""

    knob: str
    value: float
    others: dict[str, float]


class _Simulation(NamedTuple):
    trace: Trace
    replay: SimReplay

    def __call__(self, trial: _Trial) -> Point:
        engine = self.replay.engine
        knobs = {**trial.others, trial.knob: trial.value}
        clean = Knobs(**validate_knobs(knobs, engine))  # pyright: ignore[reportArgumentType]
        result = replay_simulated(self.trace, replace(self.replay, engine=engine.with_(knobs=clean)))
        return Point(knob=trial.knob, value=trial.value, knobs=knobs, summary=result.summary)
