"""The fit finds a known profile again, and says how well it predicts."""

from dataclasses import fields

import pytest

from kvpilot.engine.errors import ConfigError, KVPilotError
from kvpilot.engine.step_features import StepFeatures
from kvpilot.env.calibration.fit import fit_profile
from kvpilot.env.calibration.measured import StepLog, read_steps
from kvpilot.env.simulator.latency import LatencyProfile, load_profile, parse_profile
from kvpilot.env.simulator.step_cost import ramp_seconds

LADDER = ("bf16", "int8", "int4")


def fit(steps):
    return fit_profile(steps, LADDER, name="fit", model=None, engine={}, quality_loss={}, origin={})


def test_a_known_profile_is_found_again(truth, steps_of):
    found = fit(steps_of(truth, 600, noise=0.0))
    assert found.errors["all"].p90 < 0.01
    assert found.profile.kv_byte == pytest.approx(truth.kv_byte, rel=0.02)
    assert found.profile.convert == pytest.approx(truth.convert, rel=0.02)
    assert found.profile.prefill_context == pytest.approx(truth.prefill_context, rel=0.02)
    assert found.profile.prefill_pair == pytest.approx(truth.prefill_pair, rel=0.02)


def test_noise_shows_in_the_held_out_error_and_not_as_bias(truth, steps_of):
    found = fit(steps_of(truth, 2000, noise=0.05))
    assert 0.02 < found.errors["decode"].median < 0.06
    assert abs(found.errors["all"].bias) < 0.02


def test_steps_that_something_else_delayed_do_not_count(truth, steps_of):
    steps = steps_of(truth, 600, noise=0.0)
    delayed = [
        step._replace(seconds=step.seconds * 10) if k % 17 == 0 else step for k, step in enumerate(steps)
    ]
    found = fit(delayed)
    assert found.num_outliers > 20
    assert found.errors["all"].median < 0.03


def test_no_coefficient_is_negative_and_more_rows_never_cost_less(truth, steps_of):
    profile = fit(steps_of(truth, 300, noise=0.3)).profile
    numbers = [
        profile.fixed,
        profile.prefill_token,
        profile.prefill_pair,
        profile.sequence,
        profile.moved_byte,
    ]
    assert all(n >= 0 for n in [*numbers, *profile.kv_byte.values(), *profile.convert.values()])
    costs = [ramp_seconds(profile.rows, rows) for rows in range(300)]
    assert costs == sorted(costs)


def test_too_few_steps_of_a_kind_are_refused(truth, steps_of):
    without_mixed = [step for step in steps_of(truth, 300, noise=0.0) if step.kind != "mixed"]
    with pytest.raises(KVPilotError, match="'mixed'"):
        fit(without_mixed)


def test_recorded_steps_are_read_back(tmp_path, truth, steps_of):
    steps = steps_of(truth, 20, noise=0.1)
    log = StepLog(tmp_path / "steps.jsonl")
    for step in steps:
        log.add(step)
    assert read_steps(tmp_path / "steps.jsonl") == steps  # before it is closed: nothing is lost
    log.close()
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write('{"features": {}}\n')
    with pytest.raises(KVPilotError, match=f"line {len(steps) + 1}"):
        read_steps(tmp_path / "steps.jsonl")


def test_a_profile_is_read_back(tmp_path, truth):
    truth.write(tmp_path / "p.json")
    assert load_profile(str(tmp_path / "p.json")) == truth


@pytest.mark.parametrize(
    "field", [f.name for f in fields(LatencyProfile) if f.name in ("fixed", "rows", "kv_byte")]
)
def test_a_profile_with_a_bad_coefficient_is_refused(field):
    values = {
        "fixed": '"fixed": -1' if field == "fixed" else '"fixed": 1',
        "rows": '"rows": [[8, 1], [4, 1]]' if field == "rows" else '"rows": []',
        "kv_byte": '"kv_byte": {"bf16": "x"}' if field == "kv_byte" else '"kv_byte": {"bf16": 1}',
    }
    rest = '"name": "x", "prefill_token": 0, "prefill_pair": 0, "sequence": 0, "convert": {}, "moved_byte": 0'
    text = "{" + ", ".join([*values.values(), rest, '"origin": {}']) + "}"
    with pytest.raises(ConfigError, match="'bad'"):
        parse_profile(text, "bad")


def test_a_ramp_adds_up_its_slopes():
    ramp = ((0, 3.0), (2, 1.0), (5, 0.5))
    assert [ramp_seconds(ramp, n) for n in (0, 1, 2, 5, 9)] == [0.0, 3.0, 6.0, 9.0, 11.0]
    assert ramp_seconds(((134, 2.0),), 134) == 0.0


def test_converting_a_page_costs_as_many_bytes_as_it_has(truth):
    profile = LatencyProfile(**{**vars(truth), "engine": {"page_size": 32}})
    assert profile.for_page_size(512).convert["int4"] == pytest.approx(16 * truth.convert["int4"])
    step = StepFeatures(0, 0, 0, 1, 1, (0, 0, 0), (0, 0, 2), 0)
    cost, longer_cost = profile.step_cost(LADDER), profile.for_page_size(64).step_cost(LADDER)
    longer = longer_cost.seconds(step) - cost.seconds(step)
    assert longer == pytest.approx(2 * truth.convert["int4"], rel=1e-3)


def test_shipped_profiles_name_their_model_and_say_whether_they_are_calibrated():
    profile = load_profile("h200-llama3-8b")
    assert profile.model is not None
    assert profile.model.page_shape(512).num_values * 2 == 64 << 20
    assert profile.origin["calibrated"] is True
    assert set(profile.origin) >= {"machine", "versions", "date", "held_out_error"}
