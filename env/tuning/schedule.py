"""A level over time: how many users, or how many sessions start per second."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvpilot.engine.errors import ConfigError

Schedule = tuple[tuple[float, float], ...]  # (from this second on, level), rising seconds, the first at 0


def check_schedule(name: str, schedule: Schedule) -> None:
    """Raises ConfigError unless it starts at second 0, rises, and has finite levels >= 0."""
    times = [second for second, _ in schedule]
    rising = bool(times) and times[0] == 0 and all(a < b for a, b in pairwise(times))
    levels = np.array([level for _, level in schedule])
    if not rising or not np.isfinite(levels).all() or (levels < 0).any():
        raise ConfigError(
            f"{name}={list(schedule)!r} is invalid: expected [second, level] pairs, seconds rising from 0, levels >= 0"
        )


def level_at(schedule: Schedule, second: float) -> float:
    """The level that holds at this second."""
    level = 0.0
    for start, value in schedule:
        if start > second:
            break
        level = value
    return level


def draw_times(schedule: Schedule, end_seconds: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Sorted times of a Poisson process in [0, end) whose rate per second is the level."""
    edges = np.array([second for second, _ in schedule if second < end_seconds] + [end_seconds])
    rates = np.array([level for second, level in schedule if second < end_seconds])
    mass = np.concatenate([[0.0], np.cumsum(rates * np.diff(edges))])
    if mass[-1] <= 0:
        return np.empty(0)
    # where the level is 0 the mass does not grow: the first edge of such a stretch is the one to invert to
    marks = np.sort(rng.uniform(0, mass[-1], rng.poisson(mass[-1])))
    piece = np.searchsorted(mass, marks, side="right") - 1
    return edges[piece] + (marks - mass[piece]) / rates[piece]


def merged(schedules: Sequence[Schedule]) -> Schedule:
    """The product of several schedules."""
    times = sorted({second for schedule in schedules for second, _ in schedule})
    return tuple(
        (time, float(np.prod([level_at(schedule, time) for schedule in schedules]))) for time in times
    )
