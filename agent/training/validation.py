"""Rewards on validation episodes: what decides which policy is kept. Nothing is fitted to them."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvpilot.agent.evaluation.runs import KeepingJob, Run, run_all
from kvpilot.agent.jobs.workers import Workers
from kvpilot.agent.policies.spec import PolicySpec, parse_spec, tuned_specs
from kvpilot.agent.training.errors import TrainingError
from kvpilot.agent.training.request import TrainRequest
from kvpilot.agent.tune.figures import family_means
from kvpilot.engine.errors import KVPilotError
from kvpilot.env.tuning.rollout import EpisodeResult

OnDone = Callable[[int], None]


class Score(NamedTuple):
    """Mean reward per window: over the workloads, and of each."""

    reward: float
    by_workload: dict[str, float]
    changes_per_hour: float


class Validator:
    """Scores policies on the request's validation episodes, in worker processes; a context manager."""

    def __init__(self, request: TrainRequest, is_stopped: Callable[[], bool]) -> None:
        self._request, self._is_stopped = request, is_stopped
        self._episodes = request.validation_episodes()
        self._workers = Workers[Run, EpisodeResult](
            KeepingJob(request.out / "validation"), request.config.workers
        )

    def __enter__(self) -> "Validator":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._workers.__exit__(*exc_info)

    @property
    def num_episodes(self) -> int:
        return len(self._episodes)

    def baselines(self, on_done: OnDone = lambda done: None) -> dict[str, Score]:
        """Of static-best and the tuned rule."""
        specs = tuned_specs(self._request.tuned)
        return dict(zip([spec.label for spec in specs], self._score(specs, on_done), strict=True))

    def exported(self, folder: Path, on_done: OnDone = lambda done: None) -> Score:
        return self._score([parse_spec(str(folder))], on_done)[0]

    def _score(self, specs: list[PolicySpec], on_done: OnDone) -> list[Score]:
        """Raises StoppedError, TrainingError."""
        done = 0

        def count(index: int, outcome: EpisodeResult | KVPilotError) -> None:
            nonlocal done
            done += 1
            on_done(done)

        runs = [self._run(episode, spec) for spec in specs for episode in self._episodes]
        outcomes = run_all(self._workers, runs, on_done=count, is_stopped=self._is_stopped)
        results = [_result(outcome) for outcome in outcomes]
        size = len(self._episodes)
        return [_score_of(results[k : k + size]) for k in range(0, len(results), size)]

    def _run(self, episode, spec: PolicySpec) -> Run:
        every = self._request.config.environment.decide_every
        return Run(episode=episode, policy=spec, decide_every=every, weights=self._request.weights)


def _result(outcome: EpisodeResult | KVPilotError) -> EpisodeResult:
    if isinstance(outcome, KVPilotError):
        raise TrainingError(
            f"validation failed: {outcome}; what was trained is kept, go on with --resume"
        ) from outcome
    return outcome


def _score_of(results: list[EpisodeResult]) -> Score:
    by_workload = family_means(results)
    hours = sum(result.summary["hours"] for result in results)
    changes = sum(result.summary["knob_changes"] for result in results)
    return Score(sum(by_workload.values()) / len(by_workload), by_workload, changes / hours)
