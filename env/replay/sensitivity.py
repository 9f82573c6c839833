"""What each knob moves: sweeps of one knob at a time in the simulator, the others where they are best."""

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import Any, NamedTuple

from kvpilot.engine.config import KNOB_NAMES, EngineConfig, Knobs, validate_knobs
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

    Where it is stopped, the sweeps hold what was done. Raises KnobInvalidError for knobs out of bounds.
    """
    config = replay.engine
    best: dict[str, float] = {**config.knobs.as_dict(), **START, **(at or {})}
    validate_knobs(best, config)
    rounds = 1 if at is not None else rounds
    total = rounds * sum(len(grid_of(knob, config)) for knob in KNOB_NAMES)
    result, done = Sensitivity(best), 0
    context = get_context("spawn")
    with ProcessPoolExecutor(processes, context, _start_worker, (trace, replay)) as pool:
        for _ in range(rounds):
            result = Sensitivity(dict(best), {knob: [] for knob in KNOB_NAMES})
            jobs = [(knob, value) for knob in KNOB_NAMES for value in grid_of(knob, config)]
            futures = {pool.submit(_run_point, knob, value, result.best): knob for knob, value in jobs}
            for future in _completed(futures, is_stopped):
                result.sweeps[futures[future]].append(future.result())
                done += 1
                progress(done, total)
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


def _completed(futures: dict[Future[Point], str], is_stopped: Callable[[], bool]) -> Iterator[Future[Point]]:
    pending = set(futures)
    while pending and not is_stopped():
        done, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
        yield from done
    for future in pending:
        future.cancel()


# ---------------------------------------------------------------------- in the worker processes
_work: tuple[Trace, SimReplay] | None = None


def _start_worker(trace: Trace, replay: SimReplay) -> None:
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    page_size = replay.engine.page_size
    _work = (trace if trace.block_size == page_size else trace.with_block_size(page_size), replay)


def _run_point(knob: str, value: float, others: dict[str, float]) -> Point:
    assert _work is not None
    trace, replay = _work
    knobs = {**others, knob: value}
    clean = validate_knobs(knobs, replay.engine)
    engine = replay.engine.with_(knobs=Knobs(**clean))  # pyright: ignore[reportArgumentType]
    result = replay_simulated(trace, replace(replay, engine=engine))
    return Point(knob=knob, value=value, knobs=knobs, summary=result.summary)
