"""How far a trial is run: short everywhere first, and in full only if it is not pruned."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvpilot.agent.evaluation.runs import Run
from kvpilot.agent.policies.spec import PolicySpec
from kvpilot.env.tuning.episode import Episode
from kvpilot.env.tuning.reward import RewardWeights
from kvpilot.env.tuning.rollout import EpisodeResult


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Episodes of training data; every trial runs all of them for `short_seconds`, then, if it is not pruned, in
    full: first one of each workload, then the next ones."""

    episodes: tuple[Episode, ...]
    short_seconds: float
    decide_every: int = 2
    weights: RewardWeights = field(default_factory=RewardWeights)

    def rungs(self) -> list[list[tuple[Episode, float | None]]]:
        by_family: dict[str, list[Episode]] = {}
        for episode in self.episodes:
            by_family.setdefault(episode.family, []).append(episode)
        depth = max(len(group) for group in by_family.values())
        rungs: list[list[tuple[Episode, float | None]]] = [
            [(one, self.short_seconds) for one in self.episodes]
        ]
        for k in range(depth):
            rungs.append([(group[k], None) for group in by_family.values() if k < len(group)])
        return rungs

    def runs(self, policy: PolicySpec, rung: Iterable[tuple[Episode, float | None]]) -> list[Run]:
        return [
            Run(
                episode=episode,
                policy=policy,
                until_seconds=until,
                decide_every=self.decide_every,
                weights=self.weights,
            )
            for episode, until in rung
        ]

    def in_order(self, results: Sequence[EpisodeResult]) -> list[EpisodeResult]:
        """As `episodes` are."""
        places = {(episode.family, episode.seed): place for place, episode in enumerate(self.episodes)}
        return sorted(results, key=lambda result: places[result.episode["family"], result.episode["seed"]])

    def full_runs(self, policy: PolicySpec) -> list[Run]:
        return self.runs(policy, [(episode, None) for episode in self.episodes])
