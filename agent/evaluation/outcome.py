"""All results of an evaluation in one place, and what is read off them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvpilot.agent.evaluation.statistics import NOTHING_TO_WIN, Estimate, gap_closed, paired_difference
from kvpilot.env.tuning.rollout import EpisodeResult

DRIFTING = ("agentic_drift", "switch", "bursts")  # of the named workloads: the load changes by regimes
BASELINES = ("default", "static-best", "hysteresis")  # in the order in which credit is given


class Figure(NamedTuple):
    """One of the summary's numbers; `form` as in a replay's report, `better` higher, lower or neither."""

    label: str
    path: tuple[str, ...]
    form: str
    better: str


FIGURES = (
    Figure("Reward", ("reward",), "reward", "higher"),
    Figure("Prefix hit rate", ("hit_rate",), "share", "higher"),
    Figure("Whole answer, mean", ("e2e_seconds", "mean"), "seconds", "lower"),
    Figure("Whole answer, p99", ("e2e_seconds", "p99"), "seconds", "lower"),
    Figure("Time to first token, median", ("ttft_seconds", "p50"), "seconds", "lower"),
    Figure("Time to first token, p99", ("ttft_seconds", "p99"), "seconds", "lower"),
    Figure("Between two tokens, median", ("inter_token_seconds", "p50"), "seconds", "lower"),
    Figure("Between two tokens, p99", ("inter_token_seconds", "p99"), "seconds", "lower"),
    Figure("Good requests (within the SLO)", ("goodput_share",), "share", "higher"),
    Figure("Requests answered", ("requests_done",), "count", "higher"),
    Figure("Pages evicted", ("evictions",), "count", "lower"),
    Figure("Preemptions", ("preemptions",), "count", "lower"),
    Figure("Quality loss, mean KL per token", ("quality_loss",), "nats", "lower"),
    Figure("Knob changes per hour", ("changes_per_hour",), "rate", "neither"),
    Figure("Worst window, reward", ("worst_window",), "reward", "higher"),
    Figure("Minutes beyond the SLO", ("slo_violation_minutes",), "rate", "lower"),
)


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """`results[label]` has a list per seed of the policy, each with a result per episode, in order of `families`."""

    families: tuple[str, ...]
    results: Mapping[str, Sequence[Sequence[EpisodeResult]]]
    failures: Mapping[str, str]  # policies that could not be run, and why

    @property
    def labels(self) -> list[str]:
        return list(self.results)

    def groups(self) -> dict[str, list[int]]:
        """Episodes by name: each workload, those that drift, and all."""
        names = dict.fromkeys(self.families)
        by_name = {name: [k for k, family in enumerate(self.families) if family == name] for name in names}
        drifting = [k for k, family in enumerate(self.families) if family in DRIFTING]
        if len({self.families[k] for k in drifting}) > 1:
            by_name["named drift"] = drifting
        if len(names) > 1 and len(drifting) < len(self.families):
            by_name["all"] = list(range(len(self.families)))
        return by_name

    def values(self, label: str, path: tuple[str, ...], episodes: Iterable[int]) -> list[float]:
        """Per episode the mean over the policy's seeds; nan where there was nothing to measure."""
        seeds = self.results[label]
        return [_mean([_lookup(results[k].summary, path) for results in seeds]) for k in episodes]

    def mean(self, label: str, path: tuple[str, ...], episodes: Iterable[int]) -> float | None:
        mean = _mean(self.values(label, path, episodes))
        return None if np.isnan(mean) else mean

    def by_seed(self, label: str, episodes: Sequence[int]) -> list[float]:
        """Mean reward of each seed."""
        return [float(np.mean([results[k].reward for k in episodes])) for results in self.results[label]]

    def oracle_gain(self, episodes: Sequence[int]) -> float | None:
        """Mean reward of the oracle over that of the best static setting."""
        if "oracle" not in self.results:
            return None
        return paired_difference(
            self._rewards("oracle", episodes), self._rewards("static-best", episodes)
        ).value

    def can_be_won(self, episodes: Sequence[int]) -> bool | None:
        gain = self.oracle_gain(episodes)
        return None if gain is None else gain >= NOTHING_TO_WIN

    def difference(self, label: str, baseline: str, episodes: Sequence[int]) -> Estimate:
        return paired_difference(self._rewards(label, episodes), self._rewards(baseline, episodes))

    def closed(self, label: str, episodes: Sequence[int]) -> Estimate | None:
        """Share of the gap between the best static setting and the oracle."""
        if "oracle" not in self.results:
            return None
        ours, static, oracle = (self._rewards(name, episodes) for name in (label, "static-best", "oracle"))
        return gap_closed(ours, static, oracle)

    def _rewards(self, label: str, episodes: Sequence[int]) -> list[float]:
        return self.values(label, ("reward",), episodes)


def collect(
    families: Sequence[str], policies: Sequence[str], outcomes: Sequence[Any], describe: Callable[[int], str]
) -> Outcomes:
    """`outcomes` are policy after policy within each episode. Policies that failed anywhere are left out, and named:
    comparing them where they did not fail would flatter them. `describe(episode)` names an episode."""
    count = len(policies)
    results: dict[str, list[list[EpisodeResult]]] = {}
    failures: dict[str, str] = {}
    for place, label in enumerate(policies):
        own = [outcomes[episode * count + place] for episode in range(len(families))]
        failed = [k for k, one in enumerate(own) if not isinstance(one, EpisodeResult)]
        if failed:
            failures[label] = f"{describe(failed[0])}: {own[failed[0]]}"
        else:
            results.setdefault(label, []).append(own)
    return Outcomes(
        families=tuple(families),
        results={label: seeds for label, seeds in results.items() if label not in failures},
        failures=failures,
    )


def _lookup(summary: Mapping[str, Any], path: tuple[str, ...]) -> float:
    value: Any = summary
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return float("nan") if value is None else float(value)


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not np.isnan(value)]
    return float(np.mean(known)) if known else float("nan")
