from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvpilot.agent.tune.portfolio import best_regimes, family_weights, select


def worth(rewards, rows, weights) -> float:
    return float(rewards[list(rows)].max(axis=0) @ weights)


@given(st.integers(0, 10_000), st.integers(2, 6))
def test_the_greedy_choice_is_near_the_best_one(seed, largest):
    rewards = np.random.default_rng(seed).uniform(size=(8, 12))
    weights = np.full(12, 1 / 12)
    first = int(np.argmax(rewards @ weights))
    chosen = select(rewards, weights, first=first, largest=largest, least_gain=0.0)
    best = max(worth(rewards, (first, *rest), weights) for rest in combinations(range(8), largest - 1))
    assert chosen[0] == first
    assert len(set(chosen)) == len(chosen) <= largest
    gained, possible = worth(rewards, chosen, weights), best
    start = worth(rewards, [first], weights)
    assert gained - start >= (1 - 1 / np.e) * (possible - start) - 1e-9


def test_it_ends_where_a_further_setting_gains_too_little():
    rewards = np.array([[0.5, 0.5], [0.501, 0.4], [0.1, 0.9]])
    weights = np.array([0.5, 0.5])
    assert select(rewards, weights, first=0, largest=3, least_gain=0.01) == [0, 2]


def test_families_count_the_same_however_many_segments_they_have():
    assert family_weights(["a", "a", "a", "b"]).tolist() == [1 / 6, 1 / 6, 1 / 6, 0.5]


def test_each_setting_is_named_by_where_it_is_best():
    rewards = np.array([[0.5, 0.6, 0.1], [0.2, 0.3, 0.4]])
    regimes = ["x/calm", "x/calm", "x/busy"]
    named = best_regimes(rewards, [0, 1], regimes)
    assert named == [("x/calm", 0.55), ("x/busy", 0.4)]
