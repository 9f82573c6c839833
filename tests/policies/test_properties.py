"""Whatever a window says, a wish lies within the bounds; and a reset policy is a new one."""

from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot.agent.policies import NAMED
from kvpilot.agent.policies.hysteresis import SIGNALS, HysteresisConfig, HysteresisPolicy
from kvpilot.agent.policies.static import StaticPolicy
from kvpilot.engine.config import EngineConfig, Knobs, knob_bounds, validate_knobs
from kvpilot.env.observation import REQUIRED, Observation

CONFIG = EngineConfig()
BOUNDS = knob_bounds(CONFIG)
OUTSIDE = {"ttl_seconds": 1e9, "size_factor": -3.0, "max_batch": 4096.4, "kv_level": 9}
MAKERS = {
    **NAMED,
    "static": lambda: StaticPolicy(OUTSIDE),
    "hysteresis": lambda: HysteresisPolicy(HysteresisConfig(calm={"kv_level": -1}, pressure=OUTSIDE)),
}

number = st.floats(0, 1e9)
optional = st.none() | number
looks = st.builds(
    Observation,
    time=number,
    seconds=st.floats(1, 600),
    **{name: number if name in REQUIRED else optional for name in SIGNALS},
    level_shares=st.just({"bf16": 0.5}),
)
starts = st.builds(
    lambda ttl, size, batch, level: Knobs(ttl_seconds=ttl, size_factor=size, max_batch=batch, kv_level=level).as_dict(),
    st.floats(0, 86400), st.floats(0, 1), st.integers(1, 64), st.integers(0, 2),
)  # fmt: skip


def play(policy, observations, knobs) -> list[dict]:
    """The knobs after each decision, all wishes granted."""
    after = []
    for observation in observations:
        knobs = {**knobs, **policy.propose(observation, knobs, BOUNDS).knobs}
        after.append(knobs)
    return after


@pytest.mark.parametrize("name", MAKERS)
@settings(deadline=None, max_examples=60)
@given(observations=st.lists(looks, max_size=12), start=starts)
def test_every_wish_is_one_that_the_engine_accepts(name, observations, start):
    for knobs in play(MAKERS[name](), observations, start):
        assert validate_knobs(knobs, CONFIG) == knobs


@pytest.mark.parametrize("name", MAKERS)
@settings(deadline=None, max_examples=20)
@given(observations=st.lists(looks, max_size=10), start=starts)
def test_after_a_reset_a_policy_decides_as_a_new_one(name, observations, start):
    used = MAKERS[name]()
    first = play(used, observations, start)
    used.reset()
    assert play(used, observations, start) == first
    assert play(MAKERS[name](), observations, start) == first


def test_the_signals_are_the_numbers_of_an_observation():
    others = {"time", "seconds", "reset", "idle", "level_shares"}
    assert set(SIGNALS) == {f.name for f in fields(Observation)} - others
