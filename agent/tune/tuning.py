"""The whole of tuning: the best setting for all workloads, one for each, a portfolio of them, and the rule."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpilot.agent.evaluation.runs import KeepingJob, Run, run_all
from kvpilot.agent.evaluation.workers import StoppedError, Workers
from kvpilot.agent.policies.hysteresis import HysteresisConfig
from kvpilot.agent.policies.spec import PolicySpec, static_spec
from kvpilot.agent.tune import portfolio as choice
from kvpilot.agent.tune.config import TuneConfig
from kvpilot.agent.tune.result import Setting, TunedResult
from kvpilot.agent.tune.rule import first_rules, rule_settings, rule_spec, suggest_rule
from kvpilot.agent.tune.search import (
    DIRECTIONS,
    Ladder,
    Limits,
    Search,
    family_means,
    make_pruner,
    mean_figures,
    mean_of_families,
    num_done,
)
from kvpilot.agent.tune.storage import open_storage, open_study
from kvpilot.engine.config import KnobBounds, knob_bounds
from kvpilot.engine.errors import KVPilotError
from kvpilot.env.tuning.episode import Episode
from kvpilot.env.tuning.rollout import EpisodeResult

if TYPE_CHECKING:
    import optuna

TAKEN_FROM_REGIME = 2  # best settings of each workload that are run on every one
SEGMENT_WINDOWS = 30  # a phase is cut into pieces of so many windows at most
SHARE_OF_ALL, SHARE_OF_REGIMES = 0.5, 0.5  # of the minutes left, as each stage begins

Knobs = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What came out. `studies` by name, for the plots; `stopped` says why there is no more."""

    result: TunedResult
    studies: Mapping[str, "optuna.Study"]
    figures: Mapping[str, Mapping[str, Mapping[str, float]]]  # by workload and policy, on training data
    stopped: str = ""


@dataclass
class _State:
    """What is known so far, whatever happens next."""

    results: dict[str, list[EpisodeResult]] = field(
        default_factory=dict
    )  # on every episode, by PolicySpec.key
    settings: dict[str, Knobs] = field(default_factory=dict)  # the static ones among them
    rule: HysteresisConfig | None = None
    studies: dict[str, "optuna.Study"] = field(default_factory=dict)


def _ignore(policy: PolicySpec, results: list[EpisodeResult]) -> None:
    pass


class Tuner:
    """Runs the stages in order; when it is stopped, `finish` makes a result of the ones that were done."""

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
        self._storage = open_storage(config.storage)
        self._episodes = config.episodes()
        self._bounds = _common_bounds(self._episodes)
        effort = config.effort
        self._ladder = Ladder(
            episodes=self._episodes,
            short_seconds=effort.short_seconds,
            decide_every=config.decide_every,
            weights=config.weights,
        )
        self._state = _State()
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
            if not self._state.settings:
                raise
        return self._finish(stopped)

    # ------------------------------------------------------------------ stages
    def _run_default(self) -> None:
        self._know(PolicySpec(label="default", kind="named", config={"name": "default"}))

    def _search_all(self) -> Search:
        config = self._config
        several = list(DIRECTIONS) if config.several_objectives else ["maximize"]
        search = self._search("all", self._suggest_knobs, self._ladder, several, self._note_setting)
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
            search = self._search(family, self._suggest_knobs, own, ["maximize"])
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
        digest = choice.digest_of(settings)
        search = self._search(
            f"rule-{digest}", lambda t: rule_spec(suggest_rule(t, settings)), self._ladder, ["maximize"]
        )
        if search.num_done == 0:
            for params in first_rules(settings, levels):
                search.study.enqueue_trial(params, skip_if_exists=True)
        search.run(config.effort.rule_trials, self._until(1.0))
        for trial in search.best(1):
            self._state.rule = suggest_rule(_fixed(trial.params), settings)
            self._know(rule_spec(self._state.rule))

    # ------------------------------------------------------------------ parts
    def _search(
        self, name: str, suggest: Any, ladder: Ladder, directions: list[str], on_complete: Any = _ignore
    ) -> Search:
        config = self._config
        inputs = config.study_inputs(ladder.episodes)
        study = open_study(self._storage, f"{config.study}/{name}", directions, inputs)
        study.pruner = make_pruner()
        self._state.studies[name] = study
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

    def _note_setting(self, policy: PolicySpec, results: list[EpisodeResult]) -> None:
        """Known from its trial already, so that an interrupted search has something to show."""
        self._state.results[policy.key] = results
        self._state.settings[policy.key] = dict(policy.config["knobs"])

    def _know_setting(self, knobs: Knobs) -> None:
        spec = static_spec(knobs)
        if self._know(spec):
            self._state.settings[spec.key] = knobs

    def _know(self, spec: PolicySpec) -> bool:
        """Runs it on every episode, or reads what is kept; False if the engine failed with it."""
        if spec.key in self._state.results:
            return True
        outcomes = run_all(self._workers, self._ladder.full_runs(spec), is_stopped=self._is_stopped)
        results = [outcome for outcome in outcomes if isinstance(outcome, EpisodeResult)]
        if len(results) < len(outcomes):
            return False
        self._state.results[spec.key] = results
        return True

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
        chosen = self._choose()
        named = {setting.name: setting.knobs for setting in chosen}
        return dict(rule_settings(named, chosen[0].knobs, self._levels()))

    # ------------------------------------------------------------------ the result
    def _choose(self) -> list[Setting]:
        """The best over all first, then the portfolio."""
        config, state = self._config, self._state
        keys = list(state.settings)
        rewards, families, regimes = segments([state.results[key] for key in keys])
        first = keys.index(self._best_key())
        rows = choice.select(
            rewards,
            choice.family_weights(families),
            first=first,
            largest=config.portfolio,
            least_gain=config.least_gain,
        )
        named = choice.best_regimes(rewards, rows, regimes)
        settings = [
            Setting(name=choice.setting_name(knobs), knobs=knobs, regime=regime, score=score)
            for (regime, score), knobs in zip(named, (state.settings[keys[row]] for row in rows), strict=True)
        ]
        best = Setting(
            name="static-best", knobs=settings[0].knobs, regime="all", score=self._mean_reward(keys[first])
        )
        return [best, *choice.with_different_names(settings[1:])]

    def _best_key(self) -> str:
        """Within the limits if any setting is; the least broken limits otherwise are not worth a reward."""
        limits, state = self._config.limits, self._state
        keeps = [key for key in state.settings if _keeps(limits, state.results[key])]
        return max(keeps or state.settings, key=self._mean_reward)

    def _mean_reward(self, key: str) -> float:
        return mean_of_families((r.episode["family"], r.reward) for r in self._state.results[key])

    def _finish(self, stopped: str) -> Tuning:
        config, state = self._config, self._state
        portfolio = self._choose()
        best = portfolio[0]
        rule = state.rule or HysteresisConfig(calm=best.knobs, pressure=best.knobs)
        default = PolicySpec(label="default", kind="named", config={"name": "default"})
        named = {
            "default": default.key,
            "static-best": static_spec(best.knobs).key,
            "hysteresis": rule_spec(rule).key,
        }
        if state.rule is None:  # then it never switches
            state.results[named["hysteresis"]] = state.results[named["static-best"]]
        rewards = {name: family_means(state.results[key]) for name, key in named.items()}
        families = list(rewards["default"])
        own = {family: self._best_alone(family) for family in families}
        scores = {
            f: {**{name: by[f] for name, by in rewards.items()}, "static-best-here": own[f]} for f in families
        }
        result = TunedResult(
            workload=config.label,
            seeds=config.seeds,
            hashes=config.hashes(),
            static_best=best,
            portfolio=tuple(portfolio),
            hysteresis=rule,
            scores=scores,
            provenance={
                "is_partial": bool(stopped),
                "trials": self._num_trials(),
                "keeps_limits": self._keeps(best),
            },
        )
        figures = {
            family: {
                name: mean_figures([r for r in state.results[key] if r.episode["family"] == family])
                for name, key in named.items()
            }
            for family in families
        }
        return Tuning(result=result, studies=state.studies, figures=figures, stopped=stopped)

    def _keeps(self, best: Setting) -> bool:
        return _keeps(self._config.limits, self._state.results[static_spec(best.knobs).key])

    def _best_alone(self, family: str) -> float:
        """Of the settings that are known everywhere, the best mean reward in this workload."""
        return max(family_means(self._state.results[key])[family] for key in self._state.settings)

    def _num_trials(self) -> dict[str, int]:
        return {name: num_done(study) for name, study in self._state.studies.items()}


def _keeps(limits: Limits, results: Sequence[EpisodeResult]) -> bool:
    return max(limits.excess(mean_figures(results)).values(), default=0.0) <= 0


def segments(results: Sequence[Sequence[EpisodeResult]]) -> tuple[np.ndarray, list[str], list[str]]:
    """Mean rewards [S, G] of S policies in G stretches of their episodes, and each stretch's family and regime.

    A stretch is a phase of an episode, cut where it is longer than SEGMENT_WINDOWS.
    """
    columns, families, regimes = [], [], []
    for same_episode in zip(*results, strict=True):
        phases = same_episode[0].windows["phase"]
        rewards = np.array([[parts["total"] for parts in r.windows["reward"]] for r in same_episode])
        family = same_episode[0].episode["family"]
        start = 0
        for stop in range(1, len(phases) + 1):
            is_end = stop == len(phases) or phases[stop] != phases[start] or stop - start == SEGMENT_WINDOWS
            if is_end:
                columns.append(rewards[:, start:stop].mean(axis=1))
                families.append(family)
                regimes.append(f"{family}/{phases[start]}")
                start = stop
    return np.array(columns).T, families, regimes


def _best_for(family: str, search: Search, number: int) -> list["optuna.trial.FrozenTrial"]:
    complete = search.best(search.num_done)
    return sorted(complete, key=lambda t: -t.user_attrs["by_workload"].get(family, float("-inf")))[:number]


def _fixed(params: Mapping[str, Any]) -> Any:
    import optuna

    return optuna.trial.FixedTrial(dict(params))


def _common_bounds(episodes: Sequence[Episode]) -> dict[str, KnobBounds]:
    """Raises KVPilotError unless one setting can be tried on all of them."""
    bounds = {episode.family: knob_bounds(episode.engine_config()) for episode in episodes}
    first = next(iter(bounds.values()))
    other = [family for family, limits in bounds.items() if limits != first]
    if other:
        raise KVPilotError(
            f"workload {other[0]} has other bounds of its knobs: tune it apart from the others"
        )
    return first


def make_workers(config: TuneConfig) -> Workers[Run, EpisodeResult]:
    return Workers(KeepingJob(config.cache), config.workers)
