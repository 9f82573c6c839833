import json
import subprocess
import sys
from statistics import mean
from typing import Any

import pytest

from kvpilot.agent.policies import load_policy
from kvpilot.agent.policies.bandit import BanditPolicy
from kvpilot.agent.policies.hill_climb import HillClimbConfig, HillClimbPolicy
from kvpilot.agent.policies.hysteresis import HysteresisConfig, HysteresisPolicy
from kvpilot.agent.policies.objective import window_objective
from kvpilot.agent.policies.space import from_unit, to_unit
from kvpilot.agent.policies.static import StaticPolicy
from kvpilot.engine.config import EngineConfig, Knobs, knob_bounds
from kvpilot.engine.errors import ConfigError
from kvpilot.env.observation import Observation

BOUNDS = knob_bounds(EngineConfig())
START = Knobs().as_dict()


def look(**values) -> Observation:
    return Observation(time=0.0, seconds=60.0, **values)


def test_hysteresis_enters_at_the_upper_threshold_and_leaves_at_the_lower():
    config = HysteresisConfig(
        signal="waiting", high=16, low=8, calm={"kv_level": 1}, pressure={"kv_level": 2}
    )
    policy, levels, knobs = HysteresisPolicy(config), [], dict[str, Any](START)
    for waiting in (0, 15, 16, 12, 9, None, 8, 12):
        knobs |= policy.propose(look(waiting=waiting), knobs, BOUNDS).knobs
        levels.append(knobs["kv_level"])
    assert levels == [1, 1, 2, 2, 2, 2, 1, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"signal": "time"}, "signal='time'"),
        ({"low": 20}, "low <= high"),
        ({"calm": {"level": 1}}, "calm names"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        HysteresisConfig(**{"calm": {}, "pressure": {}, **changes})


def distance_to(target: dict, knobs: dict) -> float:
    pairs = zip(to_unit(target, BOUNDS), to_unit(knobs, BOUNDS), strict=True)
    return sum((a - b) ** 2 for a, b in pairs)


def climb(policy_class, decisions: int, **options) -> list[float]:
    """Squared distance to the best setting after each decision, on a landscape without noise or delay."""
    target = {"ttl_seconds": 60.0, "size_factor": 0.7, "max_batch": 40, "kv_level": 2}
    knobs, after = dict[str, Any](START), []
    policy = policy_class(objective=lambda observation: -observation.running, **options)
    for _ in range(decisions):
        knobs |= policy.propose(look(running=distance_to(target, knobs)), knobs, BOUNDS).knobs
        after.append(distance_to(target, knobs))
    return after


def test_hill_climbing_finds_the_top_where_nothing_is_noisy():
    config = HillClimbConfig(settle_decisions=0, judge_decisions=1, margin=0.0)
    after = climb(HillClimbPolicy, 200, config=config)
    assert min(after[-20:]) < 0.02 < after[0]


def test_the_bandit_comes_nearer_where_nothing_is_noisy():
    after = climb(BanditPolicy, 2000)
    assert mean(after[-200:]) < 0.6 * mean(after[:20])


def test_static_comes_back_after_somebody_else_changed_a_knob():
    policy = StaticPolicy({"kv_level": 2})
    assert policy.propose(look(), START, BOUNDS).knobs == {"kv_level": 2}
    assert policy.propose(look(), {**START, "kv_level": 2}, BOUNDS).knobs == {}
    assert policy.propose(look(), {**START, "kv_level": 1}, BOUNDS).knobs == {"kv_level": 2}


def test_the_unit_cube_covers_the_bounds():
    assert from_unit([0.0] * 4, BOUNDS) == {name: limit.low for name, limit in BOUNDS.items()}
    assert from_unit([1.0] * 4, BOUNDS) == pytest.approx({name: limit.high for name, limit in BOUNDS.items()})
    middle = {"ttl_seconds": 60.0, "size_factor": 0.5, "max_batch": 8, "kv_level": 1}
    assert from_unit(to_unit(middle, BOUNDS), BOUNDS) == pytest.approx(middle)


def test_the_objective_prices_hits_late_tokens_and_quality():
    good = window_objective(look(hit_rate=0.5, slo_violation_share=0.0, quality_loss=0.0))
    late = window_objective(look(hit_rate=0.5, slo_violation_share=0.5, quality_loss=0.0))
    lossy = window_objective(look(hit_rate=0.5, slo_violation_share=0.0, quality_loss=1e-3))
    assert good is not None
    assert good == pytest.approx(0.35)
    assert late is not None
    assert lossy is not None
    assert max(late, lossy) < good
    assert window_objective(look(slo_violation_share=0.0)) is None
    assert window_objective(look(hit_rate=0.5, quality_loss=None)) is None


def test_policies_are_loaded_by_name_and_from_knobs_in_a_file(tmp_path):
    assert load_policy("hill-climb").name == "hill-climb"
    path = tmp_path / "knobs.json"
    path.write_text(json.dumps({"kv_level": 2}))
    assert load_policy(f"static:{path}").propose(look(), START, BOUNDS).knobs == {"kv_level": 2}
    path.write_text(json.dumps({"kv_level": "two"}))
    with pytest.raises(ConfigError, match=r"knobs\.json: kv_level='two'"):
        load_policy(f"static:{path}")
    with pytest.raises(ConfigError, match=r"policy='magic' is invalid: expected default, threshold"):
        load_policy("magic")


def test_policies_need_neither_torch_nor_gymnasium():
    code = "import sys, kvpilot.agent.policies; print({*sys.modules} & {'torch', 'gymnasium'})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
