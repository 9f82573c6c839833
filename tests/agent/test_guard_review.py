"""What came of a change: settling, step back, revert, safe mode, progress, patience, budget, direction."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot.agent.control.nouns import memory_as_dict, memory_from_dict
from kvpilot.agent.control.signals import time_to_first_token
from kvpilot.agent.guard import (
    GuardLimits,
    Memory,
    Move,
    Reason,
    SloLimits,
    Watch,
    constrain,
    default_steps,
    intervals,
    note_change,
    note_conflict,
    note_failure,
    note_success,
    review,
    towards,
)
from kvpilot.agent.guard.changes import check_quality
from kvpilot.agent.guard.limits import limits_as_dict, limits_from_dict
from kvpilot.agent.guard.review import is_open, resume
from kvpilot.agent.guard.slo import has_regressed, pressure
from kvpilot.engine.config import EngineConfig, knob_bounds
from kvpilot.engine.errors import ConfigError
from kvpilot.env.observation import Observation

BOUNDS = knob_bounds(EngineConfig())
KNOBS = {"ttl_seconds": 60.0, "size_factor": 0.3, "max_batch": 16, "kv_level": 0}
LIMITS = GuardLimits(slo=SloLimits(ttft_p99_seconds=2.0), settle_seconds=60.0, reuse_seconds=120.0)


def look(memory: Memory, ttft: float | None = 0.2, *, now: float, knobs=None, limits=LIMITS, **observed):
    values = {"running": 3.0, "waiting": 0.0, "tokens_per_second": 50.0, **observed}
    observation = Observation(time=now, seconds=60.0, **values)
    signals = {"ttft_p99_seconds": ttft}
    return review(memory, observation, signals, knobs or KNOBS, now=now, unix_time=1e9 + now, limits=limits)


def changed(memory: Memory, changes: dict, *, now: float, load: float | None = 0.1, **options) -> Memory:
    return note_change(memory, changes, KNOBS, now=now, limits=LIMITS, load=load, **options)


def reasons(result) -> set[Reason]:
    return {refusal.reason for refusal in result.refusals}


def after(changes: dict) -> dict:
    return {**KNOBS, **changes}


def test_a_change_is_not_judged_before_it_has_settled():
    memory = changed(Memory(baseline=(0.1,)), {"max_batch": 8}, now=0.0)
    result = look(memory, 9.0, now=59.0, knobs=after({"max_batch": 8}))
    assert reasons(result) == {Reason.SETTLING}
    assert result.memory.target is None


def test_a_violation_after_a_change_that_was_made_within_the_slo_steps_back():
    memory = changed(Memory(baseline=(0.1,)), {"max_batch": 8}, now=0.0)
    result = look(memory, 9.0, now=60.0, knobs=after({"max_batch": 8}))
    assert reasons(result) == {Reason.SLO}
    assert result.memory.target == KNOBS
    assert len(result.memory.reverts) == 1


def test_a_violation_that_was_there_before_is_not_the_changes_fault():
    memory = changed(Memory(baseline=(4.0,)), {"kv_level": 1}, now=0.0, load=4.0)
    result = look(memory, 7.0, now=60.0, knobs=after({"kv_level": 1}))
    assert result.refusals == []
    assert result.memory.watch is not None
    assert result.memory.watch.verified


def test_worse_than_noise_reverts_and_noise_does_not():
    baseline = (0.30, 0.34, 0.26, 0.30)
    memory = changed(Memory(baseline=baseline), {"max_batch": 8}, now=0.0, load=0.3)
    knobs = after({"max_batch": 8})
    assert look(memory, 0.9, now=60.0, knobs=knobs).memory.target is None  # .45, within the floor
    worse = look(memory, 1.3, now=60.0, knobs=knobs)
    assert reasons(worse) == {Reason.REGRESSED}
    assert worse.memory.target == KNOBS
    noisy = changed(Memory(baseline=(0.1, 0.5, 0.1, 0.5)), {"max_batch": 8}, now=0.0, load=0.3)
    assert look(noisy, 1.3, now=60.0, knobs=knobs).memory.target is None


def test_what_flushes_the_cache_is_judged_after_a_reuse_interval():
    memory = changed(Memory(baseline=(0.1,)), {"size_factor": 0.1}, now=0.0, reuse_seconds=200.0)
    knobs = after({"size_factor": 0.1})
    assert memory.watch is not None
    assert memory.watch.flushes
    assert reasons(look(memory, 1.0, now=100.0, knobs=knobs)) == {Reason.SETTLING}
    assert reasons(look(memory, 1.0, now=200.0, knobs=knobs)) == {Reason.REGRESSED}
    assert reasons(look(memory, 3.0, now=100.0, knobs=knobs)) == {Reason.SLO}  # a violation does not wait


def test_a_slow_effect_is_still_blamed_on_a_verified_change():
    knobs = after({"max_batch": 8})
    memory = changed(Memory(baseline=(0.1,), last_good=KNOBS), {"max_batch": 8}, now=0.0)
    memory = look(memory, 0.2, now=60.0, knobs=knobs).memory
    assert look(memory, 0.2, now=120.0, knobs=knobs).refusals == []
    late = look(memory, 3.0, now=250.0, knobs=knobs)
    assert late.memory.target == KNOBS
    assert late.memory.reverts == ()  # the load may have changed: it does not lead to safe mode
    memory = look(memory, 0.2, now=300.0, knobs=knobs).memory
    assert memory.watch is None
    assert memory.last_good == knobs
    assert look(memory, 3.0, now=360.0, knobs=knobs).memory.target is None


def test_a_new_process_goes_on_with_a_trial_while_its_knobs_are_in_force():
    knobs = after({"max_batch": 8})
    watch = changed(Memory(baseline=(0.1,)), {"max_batch": 8}, now=5000.0, unix_time=1e9).watch
    assert watch is not None
    options = {"now": 7.0, "limits": LIMITS}
    memory = resume(Memory(), watch, knobs, unix_time=1e9 + 40, **options)
    assert memory.watch is not None
    assert memory.watch.at == -33.0
    assert reasons(look(memory, 9.0, now=27.0, knobs=knobs)) == {Reason.SLO}
    assert resume(Memory(), watch, KNOBS, unix_time=1e9 + 40, **options) == Memory()  # somebody changed them
    assert resume(Memory(), watch, knobs, unix_time=1e9 + 4000, **options) == Memory()  # long ago


def test_without_traffic_a_change_is_not_held_forever():
    memory = changed(Memory(), {"max_batch": 8}, now=0.0)
    assert reasons(look(memory, None, now=599.0)) == {Reason.SETTLING}
    assert look(memory, None, now=600.0).refusals == []


def test_too_many_reverts_latch_safe_mode_and_old_ones_are_forgotten():
    memory = Memory(baseline=(0.1,), reverts=(1e9 - 10.0, 1e9 - 20.0, 1e9 - 30.0))
    memory = changed(memory, {"max_batch": 8}, now=0.0)
    result = look(memory, 9.0, now=60.0, knobs=after({"max_batch": 8}))
    assert result.memory.safe_mode
    back = replace(result.memory, target=None)
    assert reasons(look(back, now=120.0)) == {Reason.SAFE_MODE}
    old = replace(memory, reverts=tuple(when - 4000 for when in memory.reverts))
    assert not look(old, 9.0, now=60.0, knobs=after({"max_batch": 8})).memory.safe_mode


def test_no_token_for_requests_that_wait_steps_back():
    memory = Memory(last_good=KNOBS)
    knobs = after({"max_batch": 8})
    first = look(memory, now=0.0, knobs=knobs, waiting=4.0, tokens_per_second=0.0)
    assert reasons(first) == {Reason.STALLED}
    assert first.memory.target is None
    second = look(first.memory, now=15.0, knobs=knobs, waiting=4.0, tokens_per_second=0.0)
    assert second.memory.target == KNOBS
    assert look(first.memory, now=15.0, knobs=knobs, waiting=4.0).memory.stalled == 0


def test_a_foreign_writer_freezes_and_nothing_is_known_good_any_more():
    memory = note_conflict(Memory(last_good=KNOBS, target=KNOBS), now=0.0, limits=LIMITS)
    assert (memory.last_good, memory.target) == (None, None)
    assert reasons(look(memory, now=299.0)) == {Reason.CONFLICT}
    assert look(memory, now=300.0).refusals == []


def test_the_breaker_opens_after_failures_in_a_row_and_lets_one_try_after_its_rest():
    memory = Memory()
    for _ in range(3):
        assert not is_open(memory, 0.0)
        memory = note_failure(memory, now=0.0, limits=LIMITS)
    assert is_open(memory, 299.0)
    assert not is_open(memory, 300.0)
    assert is_open(note_failure(memory, now=300.0, limits=LIMITS), 301.0)
    assert note_success(memory).failures == 0


def allowed(wanted: dict, moves=(), now: float = 1000.0, knobs=KNOBS, **limits):
    return constrain(
        wanted,
        knobs,
        BOUNDS,
        last_change={},
        now=now,
        limits=GuardLimits(min_interval_seconds=intervals(0.0), **limits),
        moves=moves,
    )


def test_a_knob_has_a_budget_of_steps_per_minute():
    moves = [Move(950.0, "max_batch", 4, 8), Move(970.0, "max_batch", 8, 16)]
    assert reasons(allowed({"max_batch": 32}, moves)) == {Reason.BUDGET}
    assert allowed({"max_batch": 32}, moves, now=1011.0).changes == {"max_batch": 32}


def test_a_knob_turns_twice_and_then_cools_down():
    moves = [Move(500.0, "kv_level", 0, 1), Move(600.0, "kv_level", 1, 0), Move(700.0, "kv_level", 0, 1)]
    knobs = after({"kv_level": 1})
    assert reasons(allowed({"kv_level": 0}, moves, knobs=knobs)) == {Reason.FLIPS}
    assert allowed({"kv_level": 2}, moves, knobs=knobs).changes == {"kv_level": 2}  # on as it went
    assert allowed({"kv_level": 0}, moves, now=1101.0, knobs=knobs).changes == {"kv_level": 0}


def test_an_operators_bounds_narrow_and_a_knob_outside_them_only_comes_nearer():
    def within(wanted, knobs, low, high):
        return constrain(
            wanted, knobs, BOUNDS, last_change={}, now=0.0, limits=LIMITS, allowed={"max_batch": (low, high)}
        ).changes

    assert within({"max_batch": 64}, KNOBS, None, 20) == {"max_batch": 20}
    far = after({"max_batch": 64})
    assert within({"max_batch": 8}, far, None, 20) == {"max_batch": 32}
    assert within({"max_batch": 60}, far, None, 20) == {}  # would have to be enlarged to 20
    assert (
        within({"max_batch": 8}, KNOBS, 100, None) == {}
    )  # the engine allows no more than 64: nothing is left


def test_quality_loss_above_budget_or_unknown_allows_no_lower_precision():
    for loss, held in ((0.002, True), (None, True), (0.0005, False)):
        assert (check_quality({"kv_level": 1}, KNOBS, loss, 0.001) is not None) is held
    assert check_quality({"kv_level": 0}, after({"kv_level": 2}), 9.0, 0.001) is None
    assert check_quality({"kv_level": 1}, KNOBS, None, None) is None


def test_who_waits_counts_as_much_as_who_was_answered():
    def seen(**changes) -> float | None:
        return time_to_first_token(Observation(time=0.0, seconds=60.0, **changes))

    assert seen(ttft_p99_seconds=0.5, waiting=0.0, waiting_mean_seconds=9.0) == 0.5
    assert seen(ttft_p99_seconds=0.5, waiting=4.0, waiting_mean_seconds=9.0) == 9.0
    assert seen(waiting=4.0, waiting_mean_seconds=3.0, waiting_oldest_seconds=9.0) == 9.0
    assert seen(waiting=0.0) is None


def test_pressure_is_the_worst_ratio_and_null_is_not_zero():
    slo = SloLimits(ttft_p99_seconds=2.0, violation_share=0.0)
    assert pressure({"ttft_p99_seconds": 1.0, "violation_share": 0.0}, slo) == 0.5
    assert pressure({"ttft_p99_seconds": None}, slo) is None
    worst = pressure({"violation_share": 0.01}, slo)
    assert worst is not None
    assert worst > 1
    assert not has_regressed(5.0, (), sigmas=3.0, floor=0.1)
    with pytest.raises(ConfigError, match="ttft_p99_seconds"):
        SloLimits(ttft_p99_seconds=0.0)


FINITE = st.floats(0, 1e6)
KNOB_VALUES = st.fixed_dictionaries(
    {
        name: st.integers(int(limit.low), int(limit.high))
        if limit.integer
        else st.floats(limit.low, limit.high)
        for name, limit in BOUNDS.items()
    }
)


@given(KNOB_VALUES, KNOB_VALUES)
def test_the_way_back_stays_within_bounds_and_step_and_arrives(knobs, target):
    steps = default_steps()
    for _ in range(60):
        changes = towards(target, knobs, BOUNDS, LIMITS)
        if not changes:
            break
        for name, value in changes.items():
            assert BOUNDS[name].low <= value <= BOUNDS[name].high
            assert min(knobs[name], target[name]) <= value <= max(knobs[name], target[name])
            assert value == steps[name].limit(knobs[name], value)
        knobs = {**knobs, **changes}
    assert knobs == target


@given(
    KNOB_VALUES,
    st.lists(
        st.tuples(st.dictionaries(st.sampled_from([*BOUNDS]), st.floats(-10, 1e5)), st.floats(0, 90)),
        max_size=40,
    ),
)
def test_over_any_sequence_no_knob_exceeds_budget_or_flips(knobs, schedule):
    limits = GuardLimits(min_interval_seconds=intervals(1.0))
    memory, now = Memory(), 0.0
    for wanted, pause in schedule:
        now += pause
        verdict = constrain(
            wanted,
            knobs,
            BOUNDS,
            last_change=memory.last_change(),
            now=now,
            limits=limits,
            moves=memory.moves,
        )
        memory = note_change(memory, verdict.changes, knobs, now=now, limits=limits)
        knobs = {**knobs, **verdict.changes}
        for name, step in default_steps().items():
            mine = [move for move in memory.moves if move.knob == name]
            minute = sum(step.count(move.old, move.new) for move in mine if now - move.time < 60)
            assert minute <= limits.budget_steps_per_minute + 1e-6
            recent = Memory(moves=tuple(move for move in mine if now - move.time < limits.flip_seconds))
            assert recent.num_flips(name) <= limits.max_flips


@given(
    st.builds(
        Memory,
        moves=st.lists(st.builds(Move, FINITE, st.sampled_from([*BOUNDS]), FINITE, FINITE), max_size=3).map(
            tuple
        ),
        baseline=st.lists(FINITE, max_size=3).map(tuple),
        last_good=st.none() | KNOB_VALUES,
        watch=st.none() | st.builds(Watch, at=FINITE, before=KNOB_VALUES, baseline=st.just((0.1, 0.2))),
        frozen_until=st.none() | FINITE,
        reverts=st.lists(FINITE, max_size=3).map(tuple),
        safe_mode=st.text(max_size=5),
    )
)
def test_memory_and_limits_survive_json(memory):
    assert memory_from_dict(json.loads(json.dumps(memory_as_dict(memory), allow_nan=False))) == memory
    assert limits_from_dict(json.loads(json.dumps(limits_as_dict(LIMITS), allow_nan=False))) == LIMITS
