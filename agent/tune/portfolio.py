"""A few settings that together do well everywhere."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvpilot.agent.tune.result import Setting
from kvpilot.env.tuning.rollout import EpisodeResult

SEGMENT_WINDOWS = 30  # a phase is cut into pieces of so many windows at most
ROUNDING = 1e-9  # a gain that is none
Rewards = NDArray[np.float64]  # [S settings, G segments]


def segments(results: Sequence[Sequence[EpisodeResult]]) -> tuple[Rewards, list[str], list[str]]:
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


def select(
    rewards: Rewards, weights: NDArray[np.float64], *, first: int, largest: int, least_gain: float
) -> list[int]:
    """Rows of `rewards`, greedily: each next one raises the weighted mean of the best reward per segment most.

    Begins with `first`; ends at `largest` rows, or where none gains `least_gain`. The greedy choice is within
    1 - 1/e of the best one, as the mean of maxima is submodular.
    """
    chosen, best = [first], rewards[first]
    while len(chosen) < largest:
        gains = np.maximum(rewards, best) @ weights - best @ weights
        row = int(np.argmax(gains))
        if gains[row] < max(least_gain, ROUNDING):
            break
        chosen.append(row)
        best = np.maximum(best, rewards[row])
    return chosen


def family_weights(families: Sequence[str]) -> NDArray[np.float64]:
    """Each family counts the same, however many segments it has; they add up to 1."""
    names = list(families)
    count = {name: names.count(name) for name in names}
    return np.array([1.0 / (len(count) * count[name]) for name in names])


def best_regimes(rewards: Rewards, chosen: Sequence[int], regimes: Sequence[str]) -> list[tuple[str, float]]:
    """For each chosen row the regime where it is best of the chosen most often, and its mean reward there."""
    winner = np.argmax(rewards[list(chosen)], axis=0)
    named = []
    for place, row in enumerate(chosen):
        won = [regime for regime, index in zip(regimes, winner, strict=True) if index == place]
        regime = max(dict.fromkeys(won or regimes), key=(won or list(regimes)).count)
        inside = [column for column, name in enumerate(regimes) if name == regime]
        named.append((regime, float(rewards[row, inside].mean())))
    return named


def setting_name(knobs: Mapping[str, float]) -> str:
    """Short, and different for settings that differ by what matters."""
    return (
        f"kv{knobs['kv_level']:g}-batch{knobs['max_batch']:g}"
        f"-size{knobs['size_factor']:.2f}-ttl{knobs['ttl_seconds']:.0f}"
    )


def with_different_names(settings: Sequence[Setting]) -> list[Setting]:
    """Settings that differ in digits which their names leave out get a number."""
    seen: dict[str, int] = {}
    named = []
    for setting in settings:
        seen[setting.name] = seen.get(setting.name, 0) + 1
        number = seen[setting.name]
        named.append(setting if number == 1 else replace(setting, name=f"{setting.name}-{number}"))
    return named


def digest_of(settings: Mapping[str, Mapping[str, float]]) -> str:
    text = json.dumps({name: dict(knobs) for name, knobs in settings.items()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
