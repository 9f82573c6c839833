"""The first policy: chooses what was worth most, follows the rule, predicts returns."""

import numpy as np
import pytest
import torch
from stable_baselines3.common.vec_env import DummyVecEnv

from kvpilot.agent.policies.numpy_network import NumpyNetwork
from kvpilot.agent.training.clone import advantages, clone
from kvpilot.agent.training.demonstrations import Demonstrations
from kvpilot.agent.training.errors import TrainingError
from kvpilot.agent.training.networks import (
    Normalization,
    actor_tensors,
    build_model,
    join,
    logits_and_values,
)

from .conftest import OneKnob

EPISODES, LENGTH = 20, 30


def demonstrations(seed: int = 0) -> Demonstrations:
    """Where the first input is above a half, action 4 is best, else action 2; holding gives the mean."""
    rng = np.random.default_rng(seed)
    inputs = rng.uniform(0, 1, (EPISODES * LENGTH, 2)).astype(np.float32)
    high = inputs[:, 0] > 0.5
    values = rng.normal(0, 0.02, (len(inputs), 6)).astype(np.float32)
    values[np.arange(len(inputs)), np.where(high, 4, 2)] += 0.3
    values[::3] = np.nan
    return Demonstrations(
        features=inputs,
        starts=np.arange(len(inputs)) % LENGTH == 0,
        values=values,
        rule=np.where(high, 5, 1)[:, None],
        rewards=np.full(len(inputs), 0.5, np.float32),
        round=np.zeros(len(inputs), np.int64),
    )


@pytest.fixture
def make_policy():
    def make(config):
        data = demonstrations()
        env = DummyVecEnv([OneKnob] * config.ppo.envs)
        return build_model(config, env, Normalization.of(data.features), seed=0).policy, data

    return make


@pytest.mark.parametrize(
    ("teacher", "low", "high", "recurrent"),
    [("lookahead", 2, 4, False), ("rule", 1, 5, False), ("lookahead", 2, 4, True)],
)
def test_the_clone_chooses_as_its_teacher(small, make_policy, teacher, low, high, recurrent):
    config = small.with_(demonstrations={"teacher": teacher}, ppo={"recurrent": recurrent, "lstm_units": 16})
    policy, data = make_policy(config)
    clone(policy, data, config, (6,), seed=0)
    network = NumpyNetwork(actor_tensors(policy))
    fresh = demonstrations(seed=1).features
    fresh = fresh[np.abs(fresh[:, 0] - 0.5) > 0.1]
    choices = np.array([network.logits(row).argmax() for row in fresh])
    assert (choices == np.where(fresh[:, 0] > 0.5, high, low)).mean() > 0.95


def test_the_report_compares_clone_fixed_rule_and_best(small, make_policy):
    config = small.with_(demonstrations={"teacher": "lookahead"})
    policy, data = make_policy(config)
    report = clone(policy, data, config, (6,), seed=0)
    assert report.best >= report.clone > report.fixed + 0.05
    assert report.rule < 0.05


def test_the_value_head_predicts_returns(small, make_policy):
    config = small.with_(clone={"epochs": 300, "learning_rate": 3e-3})
    policy, data = make_policy(config)
    clone(policy, data, config, (6,), seed=0)
    with torch.no_grad():
        _, values = logits_and_values(policy, torch.from_numpy(data.features[:5]))
    assert values.numpy() == pytest.approx([0.5 / (1 - 0.8)] * 5, rel=0.1)


@pytest.mark.parametrize("hidden", [(5,), (5, 4)])
def test_joined_networks_give_the_mean_of_their_logits_and_values(small, hidden):
    config, env = small.with_(clone={"hidden": hidden}), DummyVecEnv([OneKnob])
    normalization = Normalization.of(demonstrations().features)
    members = [build_model(config, env, normalization, seed).policy for seed in range(3)]
    joined = build_model(config, env, normalization, seed=9, members=3).policy
    join(joined, members)
    inputs = torch.from_numpy(demonstrations().features)
    outputs = [logits_and_values(member, inputs) for member in members]
    for got, parts in zip(logits_and_values(joined, inputs), zip(*outputs, strict=True), strict=True):
        assert torch.allclose(got, torch.stack(parts).mean(dim=0), atol=1e-6)
    assert (outputs[0][0] - outputs[1][0]).abs().max() > 1e-3


def test_returns_by_hand_and_unknown_near_the_end():
    data = demonstrations()
    returns = data.returns(0.8, 5).reshape(EPISODES, LENGTH)
    assert np.isnan(returns[:, -5:]).all()
    assert returns[0, -6] == pytest.approx(0.5 * sum(0.8**k for k in range(6)))


def test_stacked_inputs_begin_anew_with_each_episode():
    data = demonstrations()
    stacked = data.stacked(3).reshape(-1, 3, 2)
    first = LENGTH  # of the second episode
    assert (stacked[first] == data.features[first]).all()
    assert (stacked[first + 2] == data.features[first : first + 3]).all()


def test_a_change_pays_the_hold_bias(small):
    values = np.array([[0.50, 0.51, 0.30]], np.float32)
    assert advantages(values, small.clone).argmax() == 1
    assert advantages(values, small.with_(clone={"hold_bias": 0.02}).clone).argmax() == 0


def test_advantages_of_unlabelled_decisions_stay_unknown(small):
    values = np.array([[np.nan, 0.5, 0.3], [0.1, 0.2, 0.3]], np.float32)
    assert np.isnan(advantages(values, small.clone)).any(axis=1).tolist() == [True, False]


def test_demonstrations_survive_the_disk(tmp_path):
    data = demonstrations()
    data.save(tmp_path / "a.npz")
    again = Demonstrations.load(tmp_path / "a.npz")
    assert Demonstrations.join([again, again]).num_labelled == 2 * data.num_labelled == 2 * 400
    assert (again.rule == data.rule).all()
    (tmp_path / "b.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:100])
    with pytest.raises(TrainingError, match="delete it"):
        Demonstrations.load(tmp_path / "b.npz")
