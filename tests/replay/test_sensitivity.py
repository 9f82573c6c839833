"""Sweeps of one knob at a time."""

import pytest

from kvpilot.agent.simulate.sensitivity import page, table, verdict
from kvpilot.agent.simulate.sweeps import METRICS, grid_of, sweep
from kvpilot.engine.errors import KnobInvalidError

AT = {"kv_level": 0.0, "max_batch": 4.0, "size_factor": 0.5, "ttl_seconds": 60.0}
OPTIONS = {"rounds": 1, "quality_weight": 1.0, "processes": 2}


def test_each_knob_is_swept_alone_and_what_moves_is_seen(chats, replay):
    seen = []
    result = sweep(chats, replay, at=AT, **OPTIONS, progress=lambda done, total: seen.append((done, total)))
    for knob, points in result.sweeps.items():
        assert [point.value for point in points] == grid_of(knob, replay.engine)
        assert all(point.knobs == {**AT, knob: point.value} for point in points)
    assert not result.is_partial
    assert not result.unfinished
    assert verdict(result).count(" moves ") == len(result.sweeps)
    assert seen[-1][0] == seen[-1][1] == sum(map(len, result.sweeps.values()))
    assert result.movement("kv_level", "hit rate").change > 0.1
    assert result.movement("kv_level", "quality loss").low == 0.0
    assert result.movement("max_batch", "TTFT p99").change > 0.1
    for label in METRICS:
        low, high, change = result.movement("ttl_seconds", label)
        assert low <= high
        assert 0 <= change <= 1


def test_stopped_sweeps_hold_what_was_done(chats, replay):
    done = []
    result = sweep(
        chats,
        replay,
        at=AT,
        **OPTIONS,
        progress=lambda number, total: done.append(number),
        is_stopped=lambda: len(done) >= 2,
    )
    assert 2 <= sum(map(len, result.sweeps.values())) < 20
    assert result.is_partial
    assert result.unfinished
    for knob, (number, total) in result.unfinished.items():
        assert number == len(result.sweeps.get(knob, [])) < total
        assert f"{knob}: no conclusion, {number} of {total} values" in verdict(result)
        assert f"{knob} moves" not in verdict(result)
    assert page(result).layout.title.text.startswith("Partial")
    assert str(table(result, "somewhere").title).startswith("Partial")


def test_knobs_out_of_bounds_are_refused(chats, replay):
    with pytest.raises(KnobInvalidError, match="max_batch"):
        sweep(chats, replay, at={"max_batch": 1000.0}, **OPTIONS)
