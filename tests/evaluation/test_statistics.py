import numpy as np
import pytest

from kvpilot.agent.evaluation.statistics import gap_closed, paired_difference


def test_the_interval_covers_the_true_difference_about_as_often_as_it_says():
    rng, covered = np.random.default_rng(0), 0
    for _ in range(60):
        base = rng.normal(0, 5, 24)  # episodes differ much, policies little
        _, low, high = paired_difference(base + rng.normal(0.1, 0.3, 24), base)
        assert low is not None
        assert high is not None
        covered += low <= 0.1 <= high
    assert 48 <= covered <= 60


def test_one_episode_has_no_interval_and_equal_ones_have_no_width():
    assert paired_difference([0.5], [0.25]) == (0.25, None, None)
    assert paired_difference([0.5, 0.75], [0.25, 0.5]) == (0.25, 0.25, 0.25)


def test_intervals_are_the_same_every_time():
    ours, theirs = [0.4, 0.6, 0.5, 0.9], [0.3, 0.4, 0.5, 0.6]
    assert paired_difference(ours, theirs) == paired_difference(ours, theirs)


def test_the_share_of_the_gap_is_of_the_sums_not_the_mean_of_shares():
    closed = gap_closed([0.5, 0.4], [0.4, 0.4], [0.6, 0.5])
    assert closed is not None
    assert closed.value == pytest.approx(1 / 3)
    assert closed.low is not None
    assert closed.high is not None
    assert closed.low <= closed.value <= closed.high


def test_where_the_oracle_gains_little_there_is_nothing_to_win():
    assert gap_closed([0.41, 0.4], [0.4, 0.4], [0.41, 0.42]) is None
