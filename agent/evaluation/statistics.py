"""What may be said of a difference that was measured on a few episodes."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import bootstrap

RESAMPLES = 10_000
CONFIDENCE = 0.95
NOTHING_TO_WIN = (
    0.02  # mean reward: where the oracle gains less over the best static setting, control cannot pay
)


class Estimate(NamedTuple):
    """A mean and its bootstrap confidence interval over episodes; no interval from a single one."""

    value: float
    low: float | None
    high: float | None


def paired_difference(ours: ArrayLike, theirs: ArrayLike, seed: int = 0) -> Estimate:
    """Mean of `ours - theirs` over the same episodes."""
    difference = np.array(ours, dtype=float) - np.array(theirs, dtype=float)
    value = float(difference.mean())
    if len(difference) < 2:
        return Estimate(value, None, None)
    if np.ptp(difference) == 0:  # nothing to resample
        return Estimate(value, value, value)
    return Estimate(value, *_interval((difference,), _mean, seed))


def gap_closed(ours: ArrayLike, static: ArrayLike, oracle: ArrayLike, seed: int = 0) -> Estimate | None:
    """Share of the way from the best static setting to the oracle; None where there is nothing to win."""
    base, top = np.array(static, dtype=float), np.array(oracle, dtype=float)
    gain, room = np.array(ours, dtype=float) - base, top - base
    if room.mean() < NOTHING_TO_WIN:
        return None
    value = float(gain.sum() / room.sum())
    if len(room) < 2:
        return Estimate(value, None, None)
    if np.ptp(gain) == 0 and np.ptp(room) == 0:
        return Estimate(value, value, value)
    return Estimate(value, *_interval((gain, room), _ratio, seed))


def _mean(values: Any, axis: int = -1) -> Any:
    return np.mean(values, axis=axis)


def _ratio(gain: Any, room: Any, axis: int = -1) -> Any:
    """Resamples without room have no share: they count as the share of the smallest room that does."""
    return np.sum(gain, axis=axis) / np.maximum(np.sum(room, axis=axis), 1e-9)


def _interval(data: tuple[np.ndarray, ...], statistic: Any, seed: int) -> tuple[float, float]:
    found = bootstrap(
        data,
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(found.low), float(found.high)
