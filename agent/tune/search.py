"""One Optuna study, asked and told in batches: cheap runs first, and only what they favour is run in full.

A batch is asked together and judged together, so what is found depends on the seed alone, not on how many workers
there are or who of them is fast; a study that is taken up again goes on as it would have.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvpilot.agent.evaluation.runs import Outcome, Run, run_all
from kvpilot.agent.jobs.workers import StoppedError, WorkerDiedError, Workers
from kvpilot.agent.policies.spec import PolicySpec
from kvpilot.agent.tune.figures import Limits, family_means, mean_figures, mean_of_families
from kvpilot.agent.tune.ladder import Ladder
from kvpilot.agent.tune.storage import Direction, claim, give_back, take_back_lost
from kvpilot.env.tuning.rollout import EpisodeResult

if TYPE_CHECKING:
    import optuna

OBJECTIVES = ("hit_rate", "latency_seconds", "quality_loss")  # of a study with several
DIRECTIONS: tuple[Direction, ...] = ("maximize", "minimize", "minimize")
KEPT_PERCENTILE, UNPRUNED_TRIALS = 50.0, 8
FAILURE = "failure"  # user attribute: what the engine or its process died of


@dataclass
class _Open:
    """A trial under way, with what it has brought in full runs."""

    trial: "optuna.Trial"
    policy: PolicySpec
    results: list[EpisodeResult] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)  # family, error
    is_over: bool = False


class Search:
    """Fills `study` with trials of what `suggest` makes of them."""

    def __init__(
        self,
        study: "optuna.Study",
        suggest: Callable[["optuna.Trial"], PolicySpec],
        ladder: Ladder,
        workers: Workers[Run, EpisodeResult],
        *,
        limits: Limits,
        seed: int,
        batch: int,
        is_stopped: Callable[[], bool],
        on_trial: Callable[[], None] = lambda: None,
        on_complete: Callable[[PolicySpec, list[EpisodeResult]], None] = lambda policy, results: None,
    ) -> None:
        self.study, self._suggest, self._ladder, self._workers = study, suggest, ladder, workers
        self._limits, self._seed, self._batch = limits, seed, batch
        self._is_stopped, self._on_trial, self._on_complete = is_stopped, on_trial, on_complete
        self._has_one_objective = len(study.directions) == 1
        take_back_lost(study)

    def run(self, total: int, until: float) -> None:
        """Until the study has `total` trials, or `time.monotonic()` has passed `until`. Raises StoppedError."""
        while (left := total - self.num_done) > 0 and time.monotonic() < until:
            if self._is_stopped():
                raise StoppedError("stopped between two batches")
            self._run_batch(min(left, self._batch - self.num_done % self._batch))

    @property
    def num_done(self) -> int:
        return num_done(self.study)

    @property
    def _num_asked(self) -> int:
        """Without those that a stop gave back: they are asked anew."""
        from optuna.trial import TrialState

        trials = self.study.get_trials(deepcopy=False)
        return sum(trial.state != TrialState.FAIL or FAILURE in trial.user_attrs for trial in trials)

    def best(self, number: int) -> list["optuna.trial.FrozenTrial"]:
        """Complete trials, those within the limits first, by reward."""
        from optuna.trial import TrialState

        trials = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        keeps = [max(trial.constraints.values(), default=0.0) <= 0 for trial in trials]
        ranked = sorted(zip(keeps, trials, strict=True), key=lambda pair: (not pair[0], -reward_of(pair[1])))
        return [trial for _, trial in ranked[:number]]

    def _run_batch(self, number: int) -> None:
        self.study.sampler = make_sampler(self._seed + self._num_asked)
        batch: list[_Open] = []
        try:
            for _ in range(number):
                trial = self.study.ask()
                claim(trial)
                batch.append(_Open(trial, self._suggest(trial)))
            for step, rung in enumerate(self._ladder.rungs()):
                alive = [one for one in batch if not one.is_over]
                runs = [run for one in alive for run in self._ladder.runs(one.policy, rung)]
                outcomes = run_all(self._workers, runs, is_stopped=self._is_stopped)
                for k, one in enumerate(alive):
                    self._judge(one, step, outcomes[k * len(rung) : (k + 1) * len(rung)], rung)
            for one in batch:
                if not one.is_over:
                    self._complete(one)
        except (StoppedError, KeyboardInterrupt):
            for one in batch:
                if not one.is_over:
                    give_back(self.study, one.trial.number, one.trial.params)
            raise

    def _judge(self, one: _Open, step: int, outcomes: Sequence[Outcome], rung: Any) -> None:
        """Takes note of a rung's results, and ends the trial where they are among the worse."""
        from optuna.trial import TrialState

        results = [outcome for outcome in outcomes if isinstance(outcome, EpisodeResult)]
        lost = [outcome for outcome in outcomes if isinstance(outcome, WorkerDiedError)]
        if lost:
            one.trial.set_user_attr(FAILURE, str(lost[0]))
            self._tell(one, state=TrialState.FAIL)
            return
        failures = [
            (episode.family, str(outcome))
            for (episode, _), outcome in zip(rung, outcomes, strict=True)
            if not isinstance(outcome, EpisodeResult)
        ]
        is_short = step == 0
        seen = (results, failures) if is_short else (one.results + results, one.failures + failures)
        if not is_short:
            one.results, one.failures = seen
        if self._has_one_objective:
            one.trial.report(self._reward(*seen), step)
            if one.trial.should_prune():
                self._tell(one, state=TrialState.PRUNED)

    def _complete(self, one: _Open) -> None:
        """A setting that the engine failed with is told as bad: the sampler has to know what to avoid."""
        reward = self._reward(one.results, one.failures)
        figures = mean_figures(one.results)
        one.trial.set_user_attr("reward", reward)
        one.trial.set_user_attr("figures", figures)
        one.trial.set_user_attr("by_workload", family_means(one.results))
        if one.failures:
            one.trial.set_user_attr(FAILURE, one.failures[0][1])
        else:
            self._on_complete(one.policy, self._ladder.in_order(one.results))
        for name, excess in self._limits.excess(figures).items():
            one.trial.set_constraint(name, excess)
        self._tell(
            one, values=[reward] if self._has_one_objective else [figures[name] for name in OBJECTIVES]
        )

    def _reward(self, results: Sequence[EpisodeResult], failures: Sequence[tuple[str, str]]) -> float:
        worst = self._ladder.weights.failure
        pairs = [(result.episode["family"], result.reward) for result in results]
        return mean_of_families([*pairs, *((family, worst) for family, _ in failures)])

    def _tell(self, one: _Open, **told: Any) -> None:
        one.is_over = True
        self.study.tell(one.trial, **told)
        self._on_trial()


def num_done(study: "optuna.Study") -> int:
    """Trials that count: complete or pruned."""
    from optuna.trial import TrialState

    return len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)))


def make_sampler(seed: int) -> "optuna.samplers.BaseSampler":
    import optuna

    return optuna.samplers.TPESampler(seed=seed, n_startup_trials=UNPRUNED_TRIALS)


def make_pruner() -> "optuna.pruners.BasePruner":
    import optuna

    return optuna.pruners.PercentilePruner(
        KEPT_PERCENTILE, n_startup_trials=UNPRUNED_TRIALS, n_warmup_steps=0
    )


def reward_of(trial: "optuna.trial.FrozenTrial") -> float:
    """Of a complete trial, whatever its study's objectives are."""
    return float(trial.user_attrs.get("reward", "-inf"))
