"""What `autotune tune` is asked to do."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvpilot.agent.evaluation.runs import episode_hash, workload_hash
from kvpilot.agent.tune.figures import Limits
from kvpilot.agent.tune.space import SearchSpace
from kvpilot.engine.errors import ConfigError
from kvpilot.env.code_digest import code_digest
from kvpilot.env.tuning.episode import Episode
from kvpilot.env.tuning.reward import RewardWeights
from kvpilot.env.tuning.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is tried. Trials count whether they were pruned or run in full."""

    trials: int = 40  # of one setting for all workloads
    regime_trials: int = 8  # per workload, of a setting for it alone; none if there is one workload
    rule_trials: int = 24  # of the hysteresis rule
    episodes: int = 2  # per workload
    short_seconds: float = 1500.0  # of each episode, before half of the settings are given up
    seconds: float | None = None  # cuts the episodes, to try things out
    batch: int = 8  # trials asked together; part of what a seed determines

    def __post_init__(self) -> None:
        for name in ("trials", "episodes", "batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r} is invalid: expected >= 1")
        for name in ("regime_trials", "rule_trials"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)!r} is invalid: expected >= 0")
        if not self.short_seconds > 0:
            raise ConfigError(f"short_seconds={self.short_seconds!r} is invalid: expected a number > 0")


QUICK = Effort(
    trials=10, regime_trials=0, rule_trials=4, episodes=1, short_seconds=300.0, seconds=1200.0, batch=4
)
QUICK_WORKLOADS = ("agentic_drift", "switch", "bursts")


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """`workloads` are of the training split. `minutes` ends the search, not what has to follow it."""

    workloads: Mapping[str, Workload]
    label: str  # of the workloads together
    out: Path
    storage: str
    study: str = "tune"
    effort: Effort = field(default_factory=Effort)
    space: SearchSpace = field(default_factory=SearchSpace)
    limits: Limits = field(default_factory=Limits)
    weights: RewardWeights = field(default_factory=RewardWeights)
    decide_every: int = 2
    several_objectives: bool = False
    portfolio: int = 8  # settings at most
    least_gain: float = 0.002  # mean reward that a further setting of the portfolio has to bring
    workers: int = 2
    seed: int = 0
    minutes: float | None = None
    cache: Path | None = None

    def __post_init__(self) -> None:
        if not self.workloads:
            raise ConfigError("workloads is empty: expected at least one")
        if self.workers < 1:
            raise ConfigError(f"workers={self.workers!r} is invalid: expected >= 1")
        if self.portfolio < 1:
            raise ConfigError(f"portfolio={self.portfolio!r} is invalid: expected >= 1")
        if self.minutes is not None and not self.minutes > 0:
            raise ConfigError(f"minutes={self.minutes!r} is invalid: expected a number > 0")

    @property
    def seeds(self) -> dict[str, list[int]]:
        return {name: [self.seed + k for k in range(self.effort.episodes)] for name in self.workloads}

    def episodes(self) -> tuple[Episode, ...]:
        """Drawn from the workloads; cut where the effort says so."""
        cut = self.effort.seconds
        workloads = {
            name: workload if cut is None else workload.with_(seconds=(cut, cut))
            for name, workload in self.workloads.items()
        }
        return tuple(workloads[name].draw(seed) for name, seeds in self.seeds.items() for seed in seeds)

    def hashes(self) -> dict[str, str]:
        """By workload."""
        return {name: workload_hash(workload) for name, workload in self.workloads.items()}

    def study_inputs(self, episodes: tuple[Episode, ...]) -> dict[str, Any]:
        """What the values of two trials must have in common to be compared."""
        return {
            "workloads": {episode_hash(e)[:16]: e.family for e in episodes},
            "simulator": code_digest()[:16],
            "reward": self.weights.to_json(),
            "space": {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self.space).items()},
            "limits": asdict(self.limits),
            "decide_every": self.decide_every,
            "short_seconds": self.effort.short_seconds,
        }
