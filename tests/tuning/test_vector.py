"""Observations as vectors: bounded whatever comes, and the statistics that travel with a policy."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot.engine.config import EngineConfig, Knobs, knob_bounds
from kvpilot.engine.errors import ConfigError
from kvpilot.env.observation import Observation
from kvpilot.env.tuning.vector import FEATURES, FORM, Stack, knob_position, vectorize

BOUNDS = knob_bounds(EngineConfig())
KNOBS = Knobs().as_dict()
NUMBERS = [
    f.name for f in fields(Observation) if f.name not in ("time", "seconds", "reset", "idle", "level_shares")
]


def vector_of(**values):
    return dict(
        zip(FEATURES, vectorize(Observation(time=0.0, seconds=60.0, **values), KNOBS, BOUNDS), strict=True)
    )


def test_the_form_is_pinned():
    """Exported policies rely on it: whoever changes a feature raises FORM, and this with it."""
    assert (FORM, len(FEATURES)) == (1, 34)
    assert len(set(FEATURES)) == len(FEATURES)


@settings(deadline=None)
@given(
    values=st.dictionaries(st.sampled_from(NUMBERS), st.none() | st.floats(), max_size=30),
    levels=st.dictionaries(st.sampled_from(["bf16", "int8", "int4", "fp8"]), st.floats(0, 2)),
)
def test_every_vector_is_finite_and_in_bounds(values, levels):
    vector = vectorize(Observation(time=0.0, seconds=60.0, level_shares=levels, **values), KNOBS, BOUNDS)
    assert vector.dtype == np.float32
    assert np.isfinite(vector).all()
    assert (vector >= 0).all()
    assert (vector <= 1).all()


def test_absent_is_not_zero():
    absent, zero = vector_of(), vector_of(hit_rate=0.0, ttft_p50_seconds=0.0)
    assert absent["hit_rate"] == zero["hit_rate"] == 0
    assert (absent["has_hit_rate"], zero["has_hit_rate"]) == (0, 1)
    assert (absent["has_ttft_p50_seconds"], zero["has_ttft_p50_seconds"]) == (0, 1)


def test_scales_span_decades():
    waits = [vector_of(waiting_mean_seconds=s)["waiting_mean_seconds"] for s in (0, 1, 10, 100, 600, 6000)]
    assert waits == sorted(waits)
    assert waits[0] == 0
    assert waits[-2] == waits[-1] == 1
    assert min(np.diff(waits[:5])) > 0.1
    gaps = [vector_of(inter_token_p50_seconds=s)["inter_token_p50_seconds"] for s in (0.005, 0.05, 0.5)]
    assert min(np.diff(gaps)) > 0.2, "milliseconds matter between tokens"


def test_levels_are_by_rank_not_by_name():
    shares = vector_of(level_shares={"int4": 0.1, "bf16": 0.5, "int8": 0.2})
    assert [shares[f"level_{k}_share"] for k in range(3)] == pytest.approx([0.5, 0.2, 0.1])


def test_knobs_are_placed_between_their_bounds():
    for limit in BOUNDS.values():
        assert knob_position(limit.low, limit) == 0
        assert knob_position(limit.high, limit) == pytest.approx(1)
    ttl = [knob_position(s, BOUNDS["ttl_seconds"]) for s in (0, 10, 100, 1000, 10000)]
    assert np.diff(ttl) == pytest.approx([0.2] * 4, abs=0.02)


def test_averages_begin_at_the_first_vector_and_forget():
    stack = Stack(1, (2.0, 4.0))
    one, two = np.array([1], np.float32), np.array([2], np.float32)
    assert stack.push(one).tolist() == [1, 1, 1]
    assert stack.push(two).tolist() == [2, 1.5, 1.25]
    assert stack.push(two).tolist() == [2, 1.75, 1.4375]
    stack.reset()
    assert stack.push(two).tolist() == [2, 2, 2]


def test_an_average_over_less_than_one_vector_is_refused():
    with pytest.raises(ConfigError, match="averages"):
        Stack(1, (0.5,))


def test_a_stack_begins_with_copies():
    stack = Stack(3)
    one, two = np.array([1.0], np.float32), np.array([2.0], np.float32)
    assert stack.push(one).tolist() == [1, 1, 1]
    assert stack.push(two).tolist() == [1, 1, 2]
    stack.reset()
    assert stack.push(two).tolist() == [2, 2, 2]
    with pytest.raises(ConfigError, match="stack=0"):
        Stack(0)
