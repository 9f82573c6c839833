"""An observation as a fixed vector of bounded numbers: what a learned policy sees."""

import math
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvpilot.engine.config import KNOB_NAMES, KnobBounds
from kvpilot.engine.errors import ConfigError
from kvpilot.engine.kv.formats import BITS
from kvpilot.env.observation import Observation

FORM = 1  # rises whenever a feature changes its place or meaning: exported policies name the form they were made for

Vector = NDArray[np.float32]

# feature: (field of the observation, scale). A number is the value that maps to 1 on a logarithmic axis
# (log(1 + x) / log(1 + scale)); None is a share, taken as it is. All are clipped to [0, 1]; absent is 0.
SCALES: dict[str, float | None] = {
    "waiting_mean_seconds": 600.0,
    "waiting_oldest_seconds": 1800.0,
    "waiting": 256.0,
    "running": 256.0,
    "slo_violation_share": None,
    "ttft_p50_seconds": 600.0,
    "ttft_p99_seconds": 600.0,
    "inter_token_p50_seconds": 5.0,
    "inter_token_p99_seconds": 5.0,
    "live_share": None,
    "retained_share": None,
    "free_share": None,
    "arrivals_per_second": 20.0,
    "prompt_tokens_per_second": 1e6,
    "tokens_per_second": 1e5,
    "hit_rate": None,
    "preemptions": 100.0,
    "rejected": 100.0,
    "forced_admissions": 100.0,
    "released_per_second": 1000.0,
    "retained_released_per_second": 1000.0,
    "stepped_down_per_second": 1000.0,
    "quality_loss": None,
}
# counted in 1/1000 before the log
FINE = {"inter_token_p50_seconds": 1000.0, "inter_token_p99_seconds": 1000.0}
FULL_LOSS_KL = 0.0024  # nats per token: twice that of int4 pages
MASKED = ("hit_rate", "slo_violation_share", "ttft_p50_seconds", "inter_token_p50_seconds")  # None means much
NUM_LEVELS = 3  # rungs of the ladder, from full precision down; more are added to the last

FEATURES: tuple[str, ...] = (
    *SCALES,
    *(f"has_{name}" for name in MASKED),
    *(f"level_{k}_share" for k in range(NUM_LEVELS)),
    *(f"knob_{name}" for name in KNOB_NAMES),
)


def vectorize(
    observation: Observation, knobs: Mapping[str, float], bounds: Mapping[str, KnobBounds]
) -> Vector:
    """float32[len(FEATURES)] in [0, 1], finite whatever is absent."""
    values = [_scaled(name, getattr(observation, name), scale) for name, scale in SCALES.items()]
    values += [float(getattr(observation, name) is not None) for name in MASKED]
    values += _level_shares(observation.level_shares)
    values += [knob_position(knobs[name], bounds[name]) for name in KNOB_NAMES]
    return np.array(values, dtype=np.float32)


def knob_position(value: float, limit: KnobBounds) -> float:
    """0 at the lower bound, 1 at the upper one, on the knob's own scale."""
    if limit.high <= limit.low:
        return 0.0
    if limit.scale == "log":
        return math.log1p(value - limit.low) / math.log1p(limit.high - limit.low)
    return (value - limit.low) / (limit.high - limit.low)


def _scaled(name: str, value: float | None, scale: float | None) -> float:
    if value is None or not math.isfinite(value):
        return 0.0
    if name == "quality_loss":
        value /= FULL_LOSS_KL
    if scale is None:
        return min(max(value, 0.0), 1.0)
    fine = FINE.get(name, 1.0)
    return min(math.log1p(max(value, 0.0) * fine) / math.log1p(scale * fine), 1.0)


def _level_shares(shares: Mapping[str, float]) -> list[float]:
    by_bits = sorted(shares, key=lambda codec: -BITS.get(codec, 0))
    levels = [0.0] * NUM_LEVELS
    for rank, codec in enumerate(by_bits):
        levels[min(rank, NUM_LEVELS - 1)] += shares[codec]
    return [min(max(share, 0.0), 1.0) for share in levels]


class Stack:
    """The last `depth` vectors, oldest first, and running averages of all, as one. The first vector stands for those
    before it. An average over `length` moves by 1/length of the way to each vector."""

    def __init__(self, depth: int, averages: Sequence[float] = ()) -> None:
        if depth < 1:
            raise ConfigError(f"stack={depth!r} is invalid: expected >= 1")
        if not all(length >= 1 for length in averages):
            raise ConfigError(f"averages={averages!r} is invalid: expected lengths >= 1")
        self.depth, self.averages = depth, tuple(averages)
        self._seen: deque[Vector] = deque(maxlen=depth)
        self._means: list[Vector] = []

    @property
    def copies(self) -> int:
        """Vectors in one."""
        return self.depth + len(self.averages)

    def reset(self) -> None:
        self._seen.clear()

    def push(self, vector: Vector) -> Vector:
        """float32[copies * F]"""
        if not self._seen:
            self._seen.extend([vector] * (self.depth - 1))
            self._means = [vector] * len(self.averages)
        self._seen.append(vector)
        self._means = [
            mean + np.divide(vector - mean, length, dtype=np.float32)
            for mean, length in zip(self._means, self.averages, strict=True)
        ]
        return np.concatenate([*self._seen, *self._means])
