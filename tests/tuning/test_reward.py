"""What a window is worth."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot.agent.policies.objective import window_objective
from kvpilot.engine.errors import ConfigError
from kvpilot.engine.stats import METRICS, StatsRecorder, StatsWindow
from kvpilot.env.observation import Observation
from kvpilot.env.tuning.reward import (
    ObjectiveReward,
    RewardError,
    RewardParts,
    RewardWeights,
    latency_savings,
    mean_latency,
    relative_loss,
)


def window(latencies=(), waiting=0.0, waited=0.0) -> StatsWindow:
    """60 s in which requests ended after `latencies` seconds."""
    recorder = StatsRecorder()
    gauges = {(name, ()): 0.0 for name, m in METRICS.items() if m.kind == "gauge" and not m.labels}
    start = recorder.snapshot(0.0, gauges)
    for seconds in latencies:
        recorder.observe("e2e_request_seconds", seconds)
    gauges |= {("requests_waiting", ()): waiting, ("waiting_mean_seconds", ()): waited}
    return StatsWindow(start=start, end=recorder.snapshot(60.0, gauges))


def seen(**values) -> Observation:
    known = {"hit_rate": 0.5, "slo_violation_share": 0.0, "quality_loss": 0.0, "waiting": 0.0}
    return Observation(time=60.0, seconds=60.0, **{**known, **values})


def test_the_parts_by_hand():
    observation = seen(hit_rate=0.8, slo_violation_share=0.25, quality_loss=0.0012)
    parts = ObjectiveReward().update(window([4.0, 8.0]), observation, reference=12.0, changes=2)
    assert parts == pytest.approx(
        RewardParts(
            total=0.56 + 0.15 - 0.075 - 0.24 - 0.004,
            hits=0.7 * 0.8,
            latency=0.3 * (12 - 6) / 12,
            slo=-0.3 * 0.25,
            quality=-6 * 0.0012 / 0.03,
            churn=-0.002 * 2,
        )
    )


def test_the_strict_quality_weight_prices_a_loss_of_5_percent_at_point_3():
    assert RewardWeights().quality * 0.05 == pytest.approx(0.3)
    assert relative_loss(0.0012) == pytest.approx(0.04)
    assert relative_loss(7e-5) < 0.0025


@settings(deadline=None)
@given(st.floats(0.001, 1e4), st.floats(0.001, 1e4))
def test_savings_are_bounded_and_antisymmetric(seconds, reference):
    savings = latency_savings(seconds, reference)
    assert -1 < savings < 1
    assert savings == -latency_savings(reference, seconds)
    assert (savings > 0) == (seconds < reference)


def test_without_answers_the_wait_counts():
    assert mean_latency(window([2.0, 4.0], waiting=9.0, waited=100.0)) == 3.0
    assert mean_latency(window(waiting=3.0, waited=50.0)) == 50.0
    assert mean_latency(window()) is None


def test_a_stalled_engine_earns_nothing():
    reward = ObjectiveReward()
    reward.update(window([1.0]), seen(hit_rate=1.0), 1.0)
    idle = reward.update(window(), seen(hit_rate=None, slo_violation_share=None), None)
    assert idle.total == pytest.approx(0.7), "nothing to do: what was cached stays cached"
    stalled = seen(hit_rate=None, slo_violation_share=None, waiting=5.0)
    parts = reward.update(window(waiting=5.0, waited=60.0), stalled, 20.0)
    assert parts.hits == 0
    assert parts.slo == pytest.approx(-0.3)
    assert parts.latency == pytest.approx(0.3 * (20 - 60) / 60)


def test_reset_forgets():
    reward = ObjectiveReward()
    reward.update(window([1.0]), seen(hit_rate=1.0), 1.0)
    reward.reset()
    assert reward.update(window(), seen(hit_rate=None), None).hits == 0


def test_what_is_no_number_is_an_error_that_names_it():
    with pytest.raises(RewardError, match="reward part quality=nan at 60 s"):
        ObjectiveReward().update(window([1.0]), seen(quality_loss=None), 1.0)
    with pytest.raises(RewardError, match="reward part hits=nan"):
        ObjectiveReward().update(window([1.0]), seen(hit_rate=math.nan), 1.0)


def test_the_live_objective_is_the_same_without_a_reference():
    observation = seen(hit_rate=0.8, slo_violation_share=0.25, quality_loss=0.0006)
    live = ObjectiveReward().update(window([4.0]), observation, reference=None)
    simulated = ObjectiveReward().update(window([4.0]), observation, reference=8.0)
    assert live.latency == 0
    assert live.total == pytest.approx(simulated.total - simulated.latency)
    assert window_objective(observation) == pytest.approx(live.total)


def test_weights_are_checked():
    with pytest.raises(ConfigError, match="weight quality=-1"):
        RewardWeights(quality=-1)


def test_a_failure_is_worth_less_than_any_window():
    worst = ObjectiveReward().update(
        window(waiting=1.0, waited=1e5),
        seen(hit_rate=0.0, slo_violation_share=1.0, quality_loss=0.0012),
        1e-3,
    )
    assert ObjectiveReward().on_failure() < worst.total
