"""What is known at any point of a search, and the result that it makes: the best setting, the portfolio, the rule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvpilot.agent.policies.hysteresis import HysteresisConfig
from kvpilot.agent.policies.spec import PolicySpec, static_spec
from kvpilot.agent.tune import portfolio
from kvpilot.agent.tune.config import TuneConfig
from kvpilot.agent.tune.figures import Limits, family_means, mean_figures, mean_of_families
from kvpilot.agent.tune.result import Setting, TunedResult
from kvpilot.agent.tune.rule import rule_spec
from kvpilot.agent.tune.search import num_done
from kvpilot.env.tuning.rollout import EpisodeResult

if TYPE_CHECKING:
    import optuna

Knobs = dict[str, float]
DEFAULT = PolicySpec(label="default", kind="named", config={"name": "default"})


@dataclass
class Known:
    """Grows as the search goes on, whatever happens next. `results` are on every episode, in their order."""

    results: dict[str, list[EpisodeResult]] = field(default_factory=dict)  # by PolicySpec.key
    settings: dict[str, Knobs] = field(default_factory=dict)  # the static ones among them
    rule: HysteresisConfig | None = None
    studies: dict[str, "optuna.Study"] = field(default_factory=dict)

    def add_setting(self, policy: PolicySpec, results: list[EpisodeResult]) -> None:
        self.results[policy.key] = results
        self.settings[policy.key] = dict(policy.config["knobs"])

    def mean_reward(self, key: str) -> float:
        return mean_of_families((result.episode["family"], result.reward) for result in self.results[key])

    def best_key(self, limits: Limits) -> str:
        """Of the settings within the limits, or of all if none is: how far limits are broken is not worth a reward."""
        keeps = [key for key in self.settings if keeps_limits(limits, self.results[key])]
        return max(keeps or self.settings, key=self.mean_reward)

    def best_alone(self, family: str) -> float:
        """The best mean reward of any setting in this workload."""
        return max(family_means(self.results[key])[family] for key in self.settings)


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What came out. `studies` by name, for the plots; `stopped` says why there is no more."""

    result: TunedResult
    studies: Mapping[str, "optuna.Study"]
    figures: Mapping[str, Mapping[str, Mapping[str, float]]]  # by workload and policy, on training data
    stopped: str = ""


def choose(known: Known, config: TuneConfig) -> list[Setting]:
    """The best over all first, then the portfolio."""
    keys = list(known.settings)
    rewards, families, regimes = portfolio.segments([known.results[key] for key in keys])
    first = known.best_key(config.limits)
    rows = portfolio.select(
        rewards,
        portfolio.family_weights(families),
        first=keys.index(first),
        largest=config.portfolio,
        least_gain=config.least_gain,
    )
    named = portfolio.best_regimes(rewards, rows, regimes)
    settings = [
        Setting(name=portfolio.setting_name(knobs), knobs=knobs, regime=regime, score=score)
        for (regime, score), knobs in zip(named, (known.settings[keys[row]] for row in rows), strict=True)
    ]
    best = Setting(name="static-best", knobs=settings[0].knobs, regime="all", score=known.mean_reward(first))
    return [best, *portfolio.with_different_names(settings[1:])]


def make_tuning(known: Known, config: TuneConfig, stopped: str = "") -> Tuning:
    """The result of what is known; where no rule is, one that never switches. `stopped` says why the search ended."""
    chosen = choose(known, config)
    best = chosen[0]
    static = static_spec(best.knobs)
    rule = known.rule or HysteresisConfig(calm=best.knobs, pressure=best.knobs)
    by_name = {
        "default": known.results[DEFAULT.key],
        "static-best": known.results[static.key],
        "hysteresis": known.results[static.key if known.rule is None else rule_spec(rule).key],
    }
    rewards = {name: family_means(results) for name, results in by_name.items()}
    families = list(rewards["default"])
    result = TunedResult(
        workload=config.label,
        seeds=config.seeds,
        hashes=config.hashes(),
        static_best=best,
        portfolio=tuple(chosen),
        hysteresis=rule,
        scores={
            family: {
                **{name: means[family] for name, means in rewards.items()},
                "static-best-here": known.best_alone(family),
            }
            for family in families
        },
        provenance={
            "is_partial": bool(stopped),
            "trials": {name: num_done(study) for name, study in known.studies.items()},
            "keeps_limits": keeps_limits(config.limits, known.results[static.key]),
        },
    )
    figures = {
        family: {
            name: mean_figures([one for one in results if one.episode["family"] == family])
            for name, results in by_name.items()
        }
        for family in families
    }
    return Tuning(result=result, studies=known.studies, figures=figures, stopped=stopped)


def keeps_limits(limits: Limits, results: Sequence[EpisodeResult]) -> bool:
    return max(limits.excess(mean_figures(results)).values(), default=0.0) <= 0
