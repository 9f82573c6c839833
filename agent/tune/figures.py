"""What users ask about, on the mean over the workloads, and limits of it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from kvpilot.engine.errors import ConfigError
from kvpilot.env.tuning.rollout import EpisodeResult


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a setting has to keep to, on the mean over the workloads; None: no such limit."""

    max_quality_loss: float | None = None  # mean KL in nats per token
    min_goodput: float | None = None  # share of answers within the SLO

    def __post_init__(self) -> None:
        loss, share = self.max_quality_loss, self.min_goodput
        if loss is not None and not 0 <= loss < inf:
            raise ConfigError(f"max_quality_loss={loss!r} is invalid: expected a number >= 0")
        if share is not None and not 0 <= share <= 1:
            raise ConfigError(f"min_goodput={share!r} is invalid: expected a number in [0, 1]")

    def excess(self, figures: Mapping[str, float]) -> dict[str, float]:
        """By limit; above 0 is broken."""
        over: dict[str, float] = {}
        if self.max_quality_loss is not None:
            over["quality_loss"] = figures["quality_loss"] - self.max_quality_loss
        if self.min_goodput is not None:
            over["goodput"] = self.min_goodput - figures["goodput_share"]
        return over


def mean_of_families(pairs: Iterable[tuple[str, float]]) -> float:
    """Each family counts the same."""
    groups: dict[str, list[float]] = {}
    for family, value in pairs:
        groups.setdefault(family, []).append(value)
    return float(np.mean([np.mean(values) for values in groups.values()]))


def family_means(results: Iterable[EpisodeResult]) -> dict[str, float]:
    """Mean reward by workload."""
    groups: dict[str, list[float]] = {}
    for result in results:
        groups.setdefault(result.episode["family"], []).append(result.reward)
    return {family: float(np.mean(values)) for family, values in groups.items()}


def mean_figures(results: Sequence[EpisodeResult]) -> dict[str, float]:
    """What users ask about, on the mean over the workloads; the worst there is where nothing was answered."""

    def mean(value: Callable[[dict[str, Any]], float | None], nothing: float) -> float:
        pairs = [(result.episode["family"], value(result.summary)) for result in results]
        known = [(family, number) for family, number in pairs if number is not None]
        return mean_of_families(known) if known else nothing

    return {
        "hit_rate": mean(lambda s: s["hit_rate"], 0.0),
        "latency_seconds": mean(lambda s: s["e2e_seconds"].get("mean"), 1e6),
        "quality_loss": mean(lambda s: s["quality_loss"], 1.0),
        "goodput_share": mean(lambda s: s["goodput_share"], 0.0),
    }
