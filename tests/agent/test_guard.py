import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot.agent.guard import (
    GuardLimits,
    Reason,
    Step,
    check_observation,
    constrain,
    default_steps,
    intervals,
)
from kvpilot.engine.config import EngineConfig, knob_bounds
from kvpilot.env.observation import REQUIRED, Observation

BOUNDS = knob_bounds(EngineConfig())
KNOBS = {"ttl_seconds": 0.0, "size_factor": 0.0, "max_batch": 16, "kv_level": 0}
LIMITS = GuardLimits(min_interval_seconds=intervals(10.0))


def observation(**changes) -> Observation:
    values = {
        "time": 100.0,
        "seconds": 10.0,
        "running": 3.0,
        "waiting": 0.0,
        "waiting_mean_seconds": 0.0,
        "waiting_oldest_seconds": 0.0,
        "live_share": 0.3,
        "preemptions": 0.0,
    }
    return Observation(**{**values, **changes})


def allowed(wanted, *, knobs=KNOBS, last_change=None, now=100.0, **kwargs):
    return constrain(wanted, knobs, BOUNDS, last_change=last_change or {}, now=now, limits=LIMITS, **kwargs)


def reasons(refusals) -> set[Reason]:
    return {refusal.reason for refusal in refusals}


def held(windows_seen: int = 9, now: float = 101.0, **changes) -> set[Reason]:
    return reasons(
        check_observation(observation(**changes), windows_seen=windows_seen, now=now, limits=LIMITS)
    )


def test_a_good_observation_is_let_through():
    assert held() == set()


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_or_non_finite_signal_holds(name):
    for value in (None, math.nan, math.inf, -1.0):
        signal: dict[str, Any] = {name: value}
        assert held(**signal) == {Reason.MISSING if value is None else Reason.NOT_FINITE}


def test_stale_reset_early_and_frozen_observations_hold():
    assert held(now=131.0) == {Reason.STALE}
    assert held(now=95.0) == {Reason.STALE}
    assert held(reset=True) == {Reason.RESET}
    assert held(windows_seen=2) == {Reason.WARMUP}
    assert held(idle=True) == {Reason.FROZEN}
    assert held(idle=True, running=0.0) == set()
    assert held(seconds=0.0) == {Reason.WINDOW}
    assert held(seconds=math.nan) == {Reason.WINDOW}


def test_a_large_change_is_shrunk_to_one_step():
    verdict = allowed({"kv_level": 2, "max_batch": 64, "size_factor": 0.8, "ttl_seconds": 600.0})
    assert verdict.changes == {"kv_level": 1, "max_batch": 32, "size_factor": 0.4, "ttl_seconds": 60.0}
    assert [refusal.reason for refusal in verdict.refusals] == [Reason.STEP] * 4
    for wanted, reached in ((86_400.0, 480.0), (0.0, 30.0)):
        verdict = allowed({"ttl_seconds": wanted}, knobs={**KNOBS, "ttl_seconds": 120.0})
        assert verdict.changes == {"ttl_seconds": reached}
        assert reasons(verdict.refusals) == {Reason.STEP}


def test_a_change_below_one_step_passes_untouched():
    verdict = allowed({"max_batch": 20, "ttl_seconds": 30.0})
    assert verdict == ({"max_batch": 20, "ttl_seconds": 30.0}, [])


@pytest.mark.parametrize(
    ("knob", "value", "reason"),
    [
        ("kv_level", math.nan, Reason.NOT_A_NUMBER),
        ("kv_level", math.inf, Reason.NOT_A_NUMBER),
        ("kv_level", "2", Reason.NOT_A_NUMBER),
        ("kv_level", None, Reason.NOT_A_NUMBER),
        ("kv_level", True, Reason.NOT_A_NUMBER),
        ("max_batch", 10**400, Reason.BOUNDS),
        ("gpu_memory", 1, Reason.UNKNOWN),
        ("kv_level", 0.5, Reason.NOT_AN_INTEGER),
    ],
)
def test_nonsense_changes_nothing(knob, value, reason):
    verdict = allowed({knob: value})
    assert verdict.changes == {}
    assert reasons(verdict.refusals) == {reason}


def test_a_knob_rests_for_its_interval():
    wanted = {"kv_level": 1, "max_batch": 20}
    verdict = allowed(wanted, last_change={"kv_level": 91.0}, now=100.0)
    assert verdict.changes == {"max_batch": 20}
    assert reasons(verdict.refusals) == {Reason.INTERVAL}
    assert allowed(wanted, last_change={"kv_level": 90.0}, now=100.0).changes == wanted


def test_a_clock_that_jumped_back_holds():
    assert allowed({"kv_level": 1}, last_change={"kv_level": 200.0}, now=100.0).changes == {}


def test_pending_cold_and_odd_knobs_hold():
    assert reasons(allowed({"kv_level": 1}, pending=["kv_level"]).refusals) == {Reason.PENDING}
    assert reasons(allowed({"kv_level": 1}, classes={"kv_level": "restart"}).refusals) == {Reason.NOT_HOT}
    odd = {**KNOBS, "kv_level": 7}
    assert reasons(allowed({"kv_level": 1}, knobs=odd).refusals) == {Reason.KNOBS_ODD}


def test_a_knob_without_limits_is_never_changed():
    for limits in (GuardLimits(steps={}), GuardLimits(min_interval_seconds={})):
        verdict = constrain({"kv_level": 1}, KNOBS, BOUNDS, last_change={}, now=0.0, limits=limits)
        assert verdict.changes == {}
        assert reasons(verdict.refusals) == {Reason.UNKNOWN}


NUMBERS = st.floats() | st.integers()
WISHES = st.dictionaries(
    st.sampled_from([*KNOBS, "page_size", ""]),
    NUMBERS | st.integers(-2, 100) | st.floats(-1, 2) | st.sampled_from(["", "2", None, True, [1]]),
)


@given(st.lists(st.tuples(WISHES, st.floats(0.0, 30.0)), max_size=30))
def test_whatever_is_wished_knobs_stay_within_bounds_step_and_interval(schedule):
    knobs, last_change, now = dict(KNOBS), {}, 0.0
    for wanted, pause in schedule:
        now += pause
        verdict = allowed(wanted, knobs=knobs, last_change=last_change, now=now)
        for name, value in verdict.changes.items():
            limit, old, wish = BOUNDS[name], knobs[name], wanted[name]
            assert limit.low <= value <= limit.high
            assert not limit.integer or isinstance(value, int)
            assert min(old, wish) <= value <= max(old, wish)  # shrunk, never enlarged or turned round
            assert now - last_change.get(name, -math.inf) >= 10.0
            step = default_steps()[name]
            assert value == step.limit(old, value)
            last_change[name] = now
        knobs.update(verdict.changes)
        unexplained = set(wanted) - set(verdict.changes) - {refusal.knob for refusal in verdict.refusals}
        assert all(wanted[name] == knobs[name] for name in unexplained)


@given(
    st.sampled_from(list(default_steps().values())),
    st.floats(0.0, 86_400.0),
    st.floats(0.0, 86_400.0),
)
def test_a_step_lies_between_the_old_and_the_wanted_value(step: Step, old, wanted):
    assert min(old, wanted) <= step.limit(old, wanted) <= max(old, wanted)


@given(
    st.fixed_dictionaries(
        {name: st.none() | st.floats() for name in REQUIRED},
        optional={"time": st.floats(), "seconds": st.floats()},
    )
)
def test_an_observation_that_passes_has_every_required_signal(fields):
    candidate = observation(**fields)
    if not check_observation(candidate, windows_seen=9, now=101.0, limits=LIMITS):
        for name in REQUIRED:
            value = getattr(candidate, name)
            assert value is not None
            assert 0 <= value < math.inf
