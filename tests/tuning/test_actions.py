"""Sets of actions: 0 holds, everything stays in bounds, and what changes is what is said."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot.engine.config import EngineConfig, Knobs, knob_bounds, validate_knobs
from kvpilot.engine.errors import ConfigError
from kvpilot.env.tuning.actions import DEFAULT_GRIDS, Absolute, Delta, Portfolio, Setting, actions_from_json

CONFIG = EngineConfig(max_batch_ceiling=32)
BOUNDS = knob_bounds(CONFIG)
SETS = {
    "portfolio": Portfolio(
        (
            Setting(name="calm", knobs={"kv_level": 0, "ttl_seconds": 300.0}),
            Setting(name="press", knobs={"kv_level": 2, "max_batch": 200}),
        )
    ),
    "absolute": Absolute(DEFAULT_GRIDS),
    "delta": Delta(),
}
knobs = st.builds(
    Knobs,
    ttl_seconds=st.floats(0, 86400),
    size_factor=st.floats(0, 1),
    max_batch=st.integers(1, 32),
    kv_level=st.integers(0, 2),
)


@pytest.mark.parametrize("kind", SETS)
@settings(deadline=None)
@given(knobs=knobs, data=st.data())
def test_actions_propose_valid_changes_only(kind, knobs, data):
    actions = SETS[kind]
    action = [data.draw(st.integers(0, size - 1)) for size in actions.sizes]
    changes = actions.changes(action, knobs.as_dict(), BOUNDS)
    assert validate_knobs(changes, CONFIG) == changes
    assert all(knobs.as_dict()[name] != value for name, value in changes.items())


@pytest.mark.parametrize("kind", SETS)
def test_action_0_holds(kind):
    actions = SETS[kind]
    assert actions.changes([0] * len(actions.sizes), Knobs().as_dict(), BOUNDS) == {}
    assert actions.size == np.prod(actions.sizes)


@pytest.mark.parametrize("kind", SETS)
def test_sets_survive_json(kind):
    again = actions_from_json(json.loads(json.dumps(SETS[kind].to_json())))
    assert again == SETS[kind]


def test_a_portfolio_switches_whole_settings_within_bounds():
    changes = SETS["portfolio"].changes(np.int64(2), Knobs().as_dict(), BOUNDS)
    assert changes == {"kv_level": 2, "max_batch": 32}
    assert SETS["portfolio"].changes(1, Knobs().as_dict(), BOUNDS) == {"ttl_seconds": 300.0}, (
        "level 0 is set already"
    )


def test_a_delta_undoes_itself():
    start = {"ttl_seconds": 40.0, "size_factor": 0.5, "max_batch": 8, "kv_level": 1}
    up = {**start, **Delta().changes([2, 2, 2, 2], start, BOUNDS)}
    assert up == {"ttl_seconds": 80.0, "size_factor": 0.6, "max_batch": 16, "kv_level": 2}
    assert {**up, **Delta().changes([1, 1, 1, 1], up, BOUNDS)} == start


def test_a_delta_leaves_and_reaches_zero():
    zero = {**Knobs().as_dict(), "ttl_seconds": 0.0}
    assert Delta().changes([2, 0, 0, 0], zero, BOUNDS) == {"ttl_seconds": 5.0}
    assert Delta().changes([1, 0, 0, 0], {**zero, "ttl_seconds": 5.0}, BOUNDS) == {"ttl_seconds": 0.0}


@pytest.mark.parametrize("action", [3, -1, [0, 0], 99])
def test_actions_that_are_none_are_refused(action):
    with pytest.raises(ConfigError, match="is invalid: expected numbers below"):
        SETS["portfolio"].changes(action, Knobs().as_dict(), BOUNDS)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "magic"}, "kind='magic' is invalid"),
        ({"kind": "portfolio"}, "malformed"),
        ({"kind": "portfolio", "settings": []}, "at least one"),
        (
            {"kind": "portfolio", "settings": [{"name": "a", "knobs": {"speed": 1}}]},
            "knob 'speed' is invalid",
        ),
        ({"kind": "absolute", "grids": {"ttl_seconds": []}}, "values for at least one knob"),
        ({"kind": "delta", "speed": 2}, "malformed"),
    ],
)
def test_malformed_sets_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        actions_from_json(values)
