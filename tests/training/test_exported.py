"""A policy on disk: decides as the network it came from, and refuses what it was not made for."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvpilot.agent.policies import load_policy
from kvpilot.agent.policies.exported import (
    DESCRIPTION,
    TOLERANCE,
    WEIGHTS,
    ExportedPolicy,
    PolicyDescription,
    PolicyFormError,
    load_exported,
    write_exported,
)
from kvpilot.agent.policies.numpy_network import NumpyNetwork
from kvpilot.agent.training.networks import Normalization, actor_tensors, build_model, logits_and_values
from kvpilot.agent.training.offline import offline_vector
from kvpilot.engine.config import EngineConfig, KnobBounds, knob_bounds
from kvpilot.env.observation import Observation
from kvpilot.env.tuning.actions import DEFAULT_GRIDS, Absolute, Portfolio, Setting
from kvpilot.env.tuning.vector import FEATURES, Stack, vectorize

NUM = len(FEATURES)
STACK, AVERAGES = 2, (3.0,)
BOUNDS = knob_bounds(EngineConfig())
KNOBS = {"ttl_seconds": 20.0, "size_factor": 0.5, "max_batch": 16, "kv_level": 1}
PORTFOLIO = Portfolio(
    tuple(Setting(name=f"level {k}", knobs={**KNOBS, "kv_level": k, "max_batch": 100}) for k in range(3))
)


def observation(rng: np.random.Generator, time: float = 0.0) -> Observation:
    return Observation(
        time=time,
        seconds=60.0,
        running=float(rng.integers(30)),
        waiting=float(rng.integers(50)),
        waiting_mean_seconds=float(rng.uniform(0, 100)),
        waiting_oldest_seconds=float(rng.uniform(100, 300)),
        live_share=float(rng.uniform(0, 1)),
        preemptions=0.0,
        hit_rate=float(rng.uniform(0, 1)) if rng.uniform() < 0.8 else None,
        level_shares={"bf16": 0.4, "int8": 0.3},
    )


def describe(actions=PORTFOLIO, **changes) -> PolicyDescription:
    values = {
        "name": "ppo",
        "actions": actions,
        "stack": STACK,
        "averages": AVERAGES,
        "interval_seconds": 120.0,
        "bounds": BOUNDS,
        "envelope_low": (0.0,) * NUM,
        "envelope_high": (1.0,) * NUM,
        "provenance": {"command": "autotune train"},
    }
    return PolicyDescription(**{**values, **changes})


@pytest.fixture
def make_model(small):
    """Random weights, larger than at the start of training: differences must not drown."""

    def make(actions=PORTFOLIO, recurrent=False):
        rng = np.random.default_rng(0)
        mean, std = (
            rng.uniform(0, 1, (STACK + len(AVERAGES)) * NUM),
            rng.uniform(0.1, 1, (STACK + len(AVERAGES)) * NUM),
        )
        normalization = Normalization(mean=mean.astype(np.float32), std=std.astype(np.float32))
        config = small.with_(ppo={"recurrent": recurrent, "lstm_units": 12})
        model = build_model(
            config, offline_vector((STACK + len(AVERAGES)) * NUM, actions.sizes, 2), normalization, seed=3
        )
        with torch.no_grad():
            for parameter in model.policy.action_net.parameters():
                parameter.mul_(100)
        return model

    return make


@pytest.fixture
def folder(make_model, tmp_path):
    write_exported(tmp_path / "policy", describe(), actor_tensors(make_model().policy))
    return tmp_path / "policy"


@pytest.mark.parametrize("recurrent", [False, True], ids=["mlp", "lstm"])
def test_the_numpy_network_equals_the_torch_network(make_model, recurrent):
    policy = make_model(recurrent=recurrent).policy
    inputs = np.random.default_rng(1).uniform(0, 1, (200, (STACK + len(AVERAGES)) * NUM)).astype(np.float32)
    with torch.no_grad():
        expected, _ = logits_and_values(policy, torch.from_numpy(inputs))
    network = NumpyNetwork(actor_tensors(policy))
    for repeat in range(2):  # again from its beginning
        network.reset()
        logits = np.stack([network.logits(row) for row in inputs])
        assert np.abs(logits - expected.numpy()).max() < 1e-5, repeat
    assert np.ptp(expected.numpy()) > 0.1


@pytest.mark.parametrize("recurrent", [False, True], ids=["mlp", "lstm"])
@pytest.mark.parametrize("actions", [PORTFOLIO, Absolute(DEFAULT_GRIDS)], ids=["portfolio", "absolute"])
def test_the_exported_policy_acts_as_the_one_of_sb3(make_model, tmp_path, actions, recurrent):
    model = make_model(actions, recurrent)
    write_exported(tmp_path, describe(actions), actor_tensors(model.policy))
    policy, rng = load_exported(tmp_path), np.random.default_rng(2)
    stack, state, seen = Stack(STACK, AVERAGES), None, set()
    policy.reset()
    for step in range(100):
        now = observation(rng, step * 60.0)
        inputs = stack.push(vectorize(now, KNOBS, BOUNDS))
        start = np.array([step == 0])
        action, state = model.predict(inputs[None], state, start, deterministic=True)
        expected = actions.changes(action[0], KNOBS, BOUNDS)
        assert policy.propose(now, KNOBS, BOUNDS).knobs == expected
        seen.add(json.dumps(expected))
    assert len(seen) > 1


def test_proposals_are_within_the_bounds_of_the_engine_at_hand(folder):
    bounds = knob_bounds(EngineConfig(max_batch_ceiling=32))
    policy, rng = load_exported(folder), np.random.default_rng(3)
    batches = {policy.propose(observation(rng), KNOBS, bounds).knobs.get("max_batch") for _ in range(50)}
    assert batches <= {None, 32}
    assert 32 in batches


def test_a_policy_survives_the_disk_and_has_a_hash_of_all_of_it(folder, make_model):
    policy = load_exported(folder)
    assert policy.description == describe()
    assert load_exported(folder / DESCRIPTION).hash == policy.hash
    assert load_policy(str(folder)).name == "ppo"
    write_exported(folder, describe(evaluation={"reward": 0.5}), actor_tensors(make_model().policy))
    assert load_exported(folder).hash != policy.hash


def test_it_runs_without_torch_gymnasium_and_pickle(folder):
    code = (
        "import sys; from pathlib import Path; from kvpilot.agent.policies.exported import load_exported;"
        f"load_exported(Path({str(folder)!r}));"
        "print([name for name in ('torch', 'gymnasium', 'stable_baselines3') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_envelope_is_what_training_saw(make_model):
    low, high = [0.0] * NUM, [1.0] * NUM
    waiting = FEATURES.index("waiting")
    high[waiting] = 0.3
    high[FEATURES.index("knob_kv_level")] = 0.0  # what it sets itself is no surprise
    described = describe(envelope_low=tuple(low), envelope_high=tuple(high))
    policy = ExportedPolicy(described, actor_tensors(make_model().policy))
    calm = replace(observation(np.random.default_rng(4)), waiting=1.0)
    assert policy.envelope_distance(calm) == 0.0
    assert not policy.is_outside_envelope(calm)
    flood = replace(calm, waiting=256.0)
    assert policy.envelope_distance(flood) == pytest.approx(0.7)
    assert policy.is_outside_envelope(flood)
    edge = replace(calm, waiting=float(np.expm1((0.3 + 0.9 * TOLERANCE) * np.log1p(256.0))))
    assert not policy.is_outside_envelope(edge)


def test_an_engine_with_other_knobs_is_refused(folder):
    policy, now = load_exported(folder), observation(np.random.default_rng(5))
    fewer = {name: limit for name, limit in BOUNDS.items() if name != "kv_level"}
    with pytest.raises(PolicyFormError, match=r"sets ttl_seconds.*this engine has"):
        policy.propose(now, KNOBS, fewer)
    shorter = knob_bounds(EngineConfig(ladder=("bf16", "int8")))
    with pytest.raises(PolicyFormError, match="trained with kv_level"):
        policy.propose(now, KNOBS, shorter)
    linear = {**BOUNDS, "max_batch": KnobBounds(low=1, high=64, integer=True, scale="linear")}
    with pytest.raises(PolicyFormError, match="trained with max_batch"):
        policy.propose(now, KNOBS, linear)


def break_json(**changes):
    def change(folder):
        values = json.loads((folder / DESCRIPTION).read_text())
        values.update(changes)
        values = {name: value for name, value in values.items() if value is not ...}
        (folder / DESCRIPTION).write_text(json.dumps(values))

    return change


BROKEN = {
    "another version of the files": (break_json(kvpilot_policy=2), "kvpilot_policy=2"),
    "another form of the vector": (break_json(vector_form=99), "vector_form=99.*autotune train"),
    "other features": (
        break_json(features=["waiting"]),
        "1 features, 'waiting' where 'waiting_mean_seconds' is expected.*autotune train",
    ),
    "weights of another export": (break_json(weights_sha256="0"), "not the one"),
    "a field is missing": (break_json(stack=...), "no field 'stack'"),
    "an interval that is a word": (break_json(interval_seconds="x"), "interval_seconds='x' is invalid"),
    "an interval before now": (break_json(interval_seconds=-5), "interval_seconds=-5 is invalid"),
    "an envelope without numbers": (break_json(envelope_high=[math.nan]), r"envelope_high\.0=nan is invalid"),
    "a setting that is a word": (
        break_json(
            actions={"kind": "portfolio", "settings": [{"name": "one", "knobs": {"max_batch": "many"}}]}
        ),
        r"actions\.settings\.0\.knobs\.max_batch='many' is invalid",
    ),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "cannot be read"),
    "weights cut off": (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:99]), "not the one"),
    "no JSON": (lambda folder: (folder / DESCRIPTION).write_text("{"), "malformed"),
    "JSON of something else": (lambda folder: (folder / DESCRIPTION).write_text("[1]"), "malformed"),
    "unknown actions": (break_json(actions={"kind": "magic"}), "kind='magic'"),
    "another stack": (break_json(stack=3), "inputs"),
    "other averages": (break_json(averages=[3.0, 10.0]), "inputs"),
    "an envelope of another length": (break_json(envelope_low=[0.0]), "envelope_low"),
}


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_files_are_refused_by_name(folder, change, message):
    change(folder)
    with pytest.raises(PolicyFormError, match=message):
        load_exported(folder)


def test_weights_that_are_no_numbers_are_refused(folder, make_model):
    tensors = actor_tensors(make_model().policy)
    tensors["layers.0.bias"] = np.full_like(tensors["layers.0.bias"], np.nan)
    write_exported(folder, describe(), tensors)
    with pytest.raises(PolicyFormError, match=r"layers\.0\.bias holds values that are not finite"):
        load_exported(folder)


def test_random_bytes_as_weights_with_the_right_hash_are_refused(folder):
    import hashlib

    junk = np.random.default_rng(6).bytes(200)
    (folder / WEIGHTS).write_bytes(junk)
    break_json(weights_sha256=hashlib.sha256(junk).hexdigest())(folder)
    with pytest.raises(PolicyFormError, match=r"policy\.safetensors is malformed"):
        load_exported(folder)
