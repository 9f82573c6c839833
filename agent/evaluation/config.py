"""What `autotune evaluate` is asked to do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvpilot.agent.evaluation.runs import Run
from kvpilot.agent.policies.spec import PolicySpec, oracle_spec, tuned_specs
from kvpilot.agent.tune.result import TunedResult
from kvpilot.engine.errors import ConfigError
from kvpilot.env.tuning.episode import Episode
from kvpilot.env.tuning.reward import RewardWeights
from kvpilot.env.tuning.workload import Workload

PEERS = ("threshold", "hill-climb", "bandit", "random")  # by name, beside default and what was tuned
SEARCHING = ("hill-climb", "bandit")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """`policies` begin with the ones that all others are compared with; those with equal labels are seeds of one."""

    workloads: Mapping[str, Workload]
    label: str
    policies: tuple[PolicySpec, ...]
    tuned: Path
    out: Path
    cache: Path | None
    split: str = "test"
    episodes: int = 6  # per workload
    seed: int = 1000
    seconds: float | None = None  # cuts the episodes
    decide_every: int = 2
    weights: RewardWeights = field(default_factory=RewardWeights)
    workers: int = 2

    def __post_init__(self) -> None:
        labels = [policy.label for policy in self.policies]
        missing = [name for name in ("default", "static-best") if name not in labels]
        if missing:
            raise ConfigError(
                f"policies={labels!r} is invalid: {missing[0]} is missing, which others are compared with"
            )
        if self.episodes < 1:
            raise ConfigError(f"episodes={self.episodes!r} is invalid: expected >= 1")
        if self.workers < 1:
            raise ConfigError(f"workers={self.workers!r} is invalid: expected >= 1")
        keys = [(policy.label, policy.key) for policy in self.policies]
        twice = [label for k, (label, key) in enumerate(keys) if (label, key) in keys[:k]]
        if twice:
            raise ConfigError(f"policy={twice[0]!r} is given twice: seeds of one policy have to differ")

    def draw(self) -> tuple[Episode, ...]:
        """The held-out episodes: the same for every policy."""
        cut = self.seconds
        drawn = []
        for workload in self.workloads.values():
            one = workload if cut is None else workload.with_(seconds=(cut, cut))
            drawn += [one.draw(self.seed + k) for k in range(self.episodes)]
        return tuple(drawn)

    def runs(self, episodes: tuple[Episode, ...]) -> list[Run]:
        """Policy after policy on each episode, so that early results can be compared."""
        return [
            Run(episode=episode, policy=policy, decide_every=self.decide_every, weights=self.weights)
            for episode in episodes
            for policy in self.policies
        ]


def choose_policies(
    tuned: TunedResult, given: Sequence[PolicySpec], *, with_peers: bool, oracle: tuple[float, float] | None
) -> tuple[PolicySpec, ...]:
    """default, what was tuned, the peers, those given, and above them the oracle (seconds it looks ahead, and how
    often). Peers that search online start from the best static setting, too."""
    start = dict(tuned.static_best.knobs)
    chosen = [_named("default"), *tuned_specs(tuned)]
    if with_peers:
        chosen += [_named(name, start=start) if name in SEARCHING else _named(name) for name in PEERS]
    chosen += given
    if oracle is not None:
        chosen.append(oracle_spec(tuned.portfolio, *oracle))
    return tuple(chosen)


def _named(name: str, **options: object) -> PolicySpec:
    return PolicySpec(label=name, kind="named", config={"name": name, **options})
