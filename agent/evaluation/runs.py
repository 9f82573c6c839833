"""One policy on one episode, as a job for a worker; results are kept, so that nothing is simulated twice."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

from kvpilot.agent.jobs.workers import Workers
from kvpilot.agent.policies.spec import PolicySpec
from kvpilot.engine.errors import KVPilotError
from kvpilot.engine.files import write_whole
from kvpilot.env.code_digest import code_digest
from kvpilot.env.tuning.episode import Episode
from kvpilot.env.tuning.reward import ObjectiveReward, RewardWeights
from kvpilot.env.tuning.rollout import EpisodeResult, run_episode
from kvpilot.env.tuning.workload import Workload

FORM = 1  # rises when kept results would be misread


@dataclass(frozen=True, kw_only=True)
class Run:
    """`until_seconds` under control, or the whole episode; decisions every `decide_every` windows, unless the policy
    was made for another interval."""

    episode: Episode
    policy: PolicySpec
    until_seconds: float | None = None
    decide_every: int = 2
    weights: RewardWeights = field(default_factory=RewardWeights)

    @cached_property
    def key(self) -> str:
        """Of everything that the result depends on, the simulator's code included."""
        parts = [
            FORM,
            code_digest(),
            episode_hash(self.episode),
            self.policy.key,
            self.until_seconds,
            self.windows_per_decision,
            self.weights.to_json(),
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]

    @property
    def windows_per_decision(self) -> int:
        seconds = self.policy.decide_seconds
        return (
            self.decide_every if seconds is None else max(1, round(seconds / self.episode.interval_seconds))
        )

    def __call__(self) -> EpisodeResult:
        return run_episode(
            self.episode,
            self.policy.make(),
            decide_every=self.windows_per_decision,
            reward=ObjectiveReward(self.weights),
            until=self.until_seconds,
        )


@dataclass(frozen=True)
class KeepingJob:
    """Runs what is not kept in `folder` yet. Results without a folder are lost with the process."""

    folder: Path | None

    def __call__(self, run: Run) -> EpisodeResult:
        path = None if self.folder is None else self.folder / f"{run.key}.json"
        kept = None if path is None else _read(path)
        if kept is not None:
            return kept
        result = run()
        if path is not None:
            _keep(result, path)
        return result


Outcome = EpisodeResult | KVPilotError


def run_all(
    workers: Workers[Run, EpisodeResult],
    runs: Sequence[Run],
    *,
    on_done: Callable[[int, Outcome], None] = lambda index, outcome: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> list[Outcome]:
    """Results in the order of `runs`, of equal runs the same one. Raises StoppedError."""
    first = {run.key: index for index, run in reversed(list(enumerate(runs)))}
    places = sorted(first.values())
    outcomes = workers.run(
        [runs[index] for index in places],
        on_done=lambda place, outcome: on_done(places[place], outcome),
        is_stopped=is_stopped,
    )
    by_key = {runs[index].key: outcome for index, outcome in zip(places, outcomes, strict=True)}
    return [by_key[run.key] for run in runs]


@cache
def episode_hash(episode: Episode) -> str:
    return episode.hash


def workload_hash(workload: Workload) -> str:
    """Of its definition and its traces, whatever split is drawn from: of what it draws first for training."""
    return episode_hash(workload.with_(split="train").draw(0))


def check_sessions(episodes: Sequence[Episode]) -> None:
    """Before long work. Raises TraceError for a trace that is too short for the split that is drawn from."""
    for episode in episodes:
        for table in episode.tables():
            table.sessions(episode.split)


def _read(path: Path) -> EpisodeResult | None:
    """None if it is not there, or was cut off by a full disk."""
    try:
        return EpisodeResult(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _keep(result: EpisodeResult, path: Path) -> None:
    """Whole or not at all. Raises OSError, which ends all of the work: the policy that was run is not at fault."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(result.to_json()))
