"""The whole of tuning: the best setting for all workloads, one for each, a portfolio of them, and the rule."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvpilot.agent.evaluation.runs import KeepingJob, Run, check_sessions, run_all
from kvpilot.agent.jobs.workers import StoppedError, Workers
from kvpilot.agent.policies.spec import PolicySpec, static_spec
from kvpilot.agent.tune.config import TuneConfig
from kvpilot.agent.tune.known import DEFAULT, Knobs, Known, Tuning, choose, make_tuning
from kvpilot.agent.tune.ladder import Ladder
from kvpilot.agent.tune.portfolio import digest_of
from kvpilot.agent.tune.rule import first_rules, rule_settings, rule_spec, suggest_rule
from kvpilot.agent.tune.search import DIRECTIONS, Search, make_pruner
from kvpilot.agent.tune.space import common_bounds
from kvpilot.agent.tune.storage import Direction, open_storage, open_study
from kvpilot.engine.errors import KVPilotError
from kvpilot.env.tuning.rollout import EpisodeResult

if TYPE_CHECKING:
    import optuna

ONE: tuple[Direction, ...] = ("maximize",)
TAKEN_FROM_REGIME = 2  # best settings of each workload that are run on every one
SHARE_OF_ALL, SHARE_OF_REGIMES = 0.5, 0.5  # of the minutes left, as each stage begins


def _ignore(policy: PolicySpec, results: list[EpisodeResult]) -> None:
    pass


class Tuner:
    """Runs the stages in order; when it is stopped, there is a result of what is known by then."""

    def __init__(
        self,
        config: TuneConfig,
        workers: Workers[Run, EpisodeResult],
        *,
        is_stopped: Callable[[], bool],
        on_trial: Callable[[], None],
    ) -> None:
        self._config, self._workers = config, workers
        self._is_stopped, self._on_trial = is_stopped, on_trial
        self._episodes = config.episodes()
        check_sessions(self._episodes)
        self._storage = open_storage(config.storage)
        self._bounds = common_bounds(self._episodes)
        effort = config.effort
        self._ladder = Ladder(
            episodes=self._episodes,
            short_seconds=effort.short_seconds,
            decide_every=config.decide_every,
            weights=config.weights,
        )
        self._known = Known()
        self._began = time.monotonic()

    def run(self) -> Tuning:
        """Raises StoppedError if it was stopped before anything was known."""
        stopped = ""
        try:
            self._run_default()
            everywhere = self._search_all()
            self._cross(self._search_regimes(everywhere))
            self._search_rule()
        except StoppedError as error:
            stopped = str(error)
            if not self._known.settings:
                raise
        return make_tuning(self._known, self._config, stopped)

    # ------------------------------------------------------------------ stages
    def _run_default(self) -> None:
        failure = self._failure(DEFAULT)
        if failure is not None:
            raise KVPilotError(
                f"default knobs could not be simulated, there is nothing to compare with: {failure}"
            ) from failure

    def _search_all(self) -> Search:
        config = self._config
        several = DIRECTIONS if config.several_objectives else ONE
        search = self._search("all", self._suggest_knobs, self._ladder, several, self._known.add_setting)
        if search.num_done == 0:
            search.study.enqueue_trial(self._default_params(), skip_if_exists=True)
        search.run(config.effort.trials, self._until(SHARE_OF_ALL))
        for trial in search.best(search.num_done):
            self._know_setting(self._knobs_of(trial.params))
        return search

    def _search_regimes(self, everywhere: Search) -> list[Knobs]:
        """The settings that are best for one workload alone; each search begins with the best for all."""
        config, found = self._config, []
        families = list(dict.fromkeys(episode.family for episode in self._episodes))
        if len(families) < 2 or config.effort.regime_trials == 0:
            return found
        until = self._until(SHARE_OF_REGIMES)
        for place, family in enumerate(families):
            own = Ladder(
                episodes=tuple(episode for episode in self._episodes if episode.family == family),
                short_seconds=config.effort.short_seconds,
                decide_every=config.decide_every,
                weights=config.weights,
            )
            search = self._search(family, self._suggest_knobs, own, ONE)
            if search.num_done == 0:
                for trial in _best_for(family, everywhere, number=3):
                    search.study.enqueue_trial(trial.params, skip_if_exists=True)
            left = max(until - time.monotonic(), 0.0) / (len(families) - place)
            search.run(config.effort.regime_trials, time.monotonic() + left)
            found += [self._knobs_of(trial.params) for trial in search.best(TAKEN_FROM_REGIME)]
        return found

    def _cross(self, settings: Sequence[Knobs]) -> None:
        """Each of them on every episode, as the portfolio is chosen by all."""
        specs = [static_spec(knobs) for knobs in settings]
        runs = [run for spec in specs for run in self._ladder.full_runs(spec)]
        run_all(self._workers, runs, is_stopped=self._is_stopped)  # together, so that no worker waits
        for knobs in settings:
            self._know_setting(knobs)

    def _search_rule(self) -> None:
        config = self._config
        settings = self._rule_settings()
        levels = self._levels()
        digest = digest_of(settings)
        search = self._search(
            f"rule-{digest}", lambda t: rule_spec(suggest_rule(t, settings)), self._ladder, ONE
        )
        if search.num_done == 0:
            for params in first_rules(settings, levels):
                search.study.enqueue_trial(params, skip_if_exists=True)
        search.run(config.effort.rule_trials, self._until(1.0))
        for trial in search.best(1):
            self._known.rule = suggest_rule(_fixed(trial.params), settings)
            self._failure(rule_spec(self._known.rule))

    # ------------------------------------------------------------------ parts
    def _search(
        self,
        name: str,
        suggest: Any,
        ladder: Ladder,
        directions: Sequence[Direction],
        on_complete: Any = _ignore,
    ) -> Search:
        config = self._config
        inputs = config.study_inputs(ladder.episodes)
        study = open_study(self._storage, f"{config.study}/{name}", directions, inputs)
        study.pruner = make_pruner()
        self._known.studies[name] = study
        return Search(
            study,
            suggest,
            ladder,
            self._workers,
            limits=config.limits,
            seed=config.seed,
            batch=config.effort.batch,
            is_stopped=self._is_stopped,
            on_trial=self._on_trial,
            on_complete=on_complete,
        )

    def _suggest_knobs(self, trial: "optuna.Trial") -> PolicySpec:
        return static_spec(self._config.space.suggest(trial, self._bounds))

    def _knobs_of(self, params: Mapping[str, Any]) -> Knobs:
        return self._config.space.suggest(_fixed(params), self._bounds)

    def _default_params(self) -> dict[str, float]:
        """The engine's own knobs, moved to where the space begins."""
        knobs = self._episodes[0].engine_config().knobs
        low, high = self._config.space.ttl_seconds
        return {**knobs.as_dict(), "ttl_seconds": min(max(knobs.ttl_seconds, low), high)}

    def _know_setting(self, knobs: Knobs) -> None:
        spec = static_spec(knobs)
        if self._failure(spec) is None:
            self._known.add_setting(spec, self._known.results[spec.key])

    def _failure(self, spec: PolicySpec) -> KVPilotError | None:
        """Runs it on every episode, or reads what is kept; None: its results are known now."""
        if spec.key in self._known.results:
            return None
        outcomes = run_all(self._workers, self._ladder.full_runs(spec), is_stopped=self._is_stopped)
        results = [outcome for outcome in outcomes if isinstance(outcome, EpisodeResult)]
        if len(results) == len(outcomes):
            self._known.results[spec.key] = results
        return next((one for one in outcomes if isinstance(one, KVPilotError)), None)

    def _until(self, share: float) -> float:
        """When a stage has to end, that may take this share of the minutes left."""
        if self._config.minutes is None:
            return float("inf")
        now, end = time.monotonic(), self._began + 60 * self._config.minutes
        return now + share * max(end - now, 0.0)

    def _levels(self) -> range:
        limit = self._bounds["kv_level"]
        return range(int(limit.low), int(limit.high) + 1)

    def _rule_settings(self) -> dict[str, Mapping[str, float]]:
        chosen = choose(self._known, self._config)
        named = {setting.name: setting.knobs for setting in chosen}
        return dict(rule_settings(named, chosen[0].knobs, self._levels()))


def _best_for(family: str, search: Search, number: int) -> list["optuna.trial.FrozenTrial"]:
    complete = search.best(search.num_done)
    return sorted(complete, key=lambda t: -t.user_attrs["by_workload"].get(family, float("-inf")))[:number]


def _fixed(params: Mapping[str, Any]) -> Any:
    import optuna

    return optuna.trial.FixedTrial(dict(params))


def make_workers(config: TuneConfig) -> Workers[Run, EpisodeResult]:
    return Workers(KeepingJob(config.cache), config.workers)
