"""Where Optuna looks for knobs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpilot.engine.config import KnobBounds, knob_bounds
from kvpilot.engine.errors import ConfigError, KVPilotError
from kvpilot.env.tuning.episode import Episode

if TYPE_CHECKING:
    import optuna


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """Narrower than the bounds where there is nothing to find: below a second, and beyond an episode, ttl_seconds
    does what its neighbours do. Retention is off where size_factor is 0."""

    ttl_seconds: tuple[float, float] = (1.0, 3600.0)
    lowest_batch: int = 4

    def __post_init__(self) -> None:
        low, high = self.ttl_seconds
        if not 0 < low < high:
            raise ConfigError(f"ttl_seconds={self.ttl_seconds!r} is invalid: expected 0 < low < high")

    def suggest(self, trial: "optuna.Trial", bounds: Mapping[str, KnobBounds]) -> dict[str, float]:
        """All four knobs, rounded to what can matter."""
        ttl_high = min(self.ttl_seconds[1], bounds["ttl_seconds"].high)
        batch = bounds["max_batch"]
        batch_low = min(max(self.lowest_batch, int(batch.low)), int(batch.high))
        ttl = trial.suggest_float("ttl_seconds", self.ttl_seconds[0], ttl_high, log=True)
        size = trial.suggest_float("size_factor", bounds["size_factor"].low, bounds["size_factor"].high)
        return {
            "ttl_seconds": float(f"{ttl:.3g}"),
            "size_factor": round(size, 3),
            "max_batch": trial.suggest_int("max_batch", batch_low, int(batch.high), log=True),
            "kv_level": trial.suggest_int(
                "kv_level", int(bounds["kv_level"].low), int(bounds["kv_level"].high)
            ),
        }


def common_bounds(episodes: Sequence[Episode]) -> dict[str, KnobBounds]:
    """Raises KVPilotError unless one setting can be tried on all of them."""
    bounds = {episode.family: knob_bounds(episode.engine_config()) for episode in episodes}
    first = next(iter(bounds.values()))
    other = [family for family, limits in bounds.items() if limits != first]
    if other:
        raise KVPilotError(
            f"workload {other[0]} has other bounds of its knobs: tune it apart from the others"
        )
    return first
