"""PPO as configured here: learns, resumes, and says what it dies of."""

import math
import os
import signal
import tempfile
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from kvpilot.agent.training.checkpoints import load_checkpoint, save_checkpoint
from kvpilot.agent.training.errors import TrainingError
from kvpilot.agent.training.fine_tuning import Watch, fine_tune
from kvpilot.agent.training.networks import Normalization, build_model

from .conftest import BEST, BrokenReward, OneKnob


@pytest.fixture
def one_knob():
    env = DummyVecEnv([OneKnob, OneKnob])
    yield env
    env.close()


def tune(model, folder, steps, **options):
    watch = options.pop("watch", Watch())
    return fine_tune(
        model, steps=steps, every_steps=1024, checkpoint=folder / "checkpoint.pt", watch=watch, **options
    )


@pytest.mark.parametrize("recurrent", [False, True], ids=["mlp", "lstm"])
def test_ppo_finds_the_known_best_value_of_one_knob(small, normalization, one_knob, tmp_path, recurrent):
    config = small.with_(ppo={"recurrent": recurrent, "lstm_units": 8})
    model = build_model(config, one_knob, normalization, seed=1)
    assert tune(model, tmp_path, 3072 if recurrent else 6144)
    for knob in range(5):
        env = OneKnob()
        env.reset(seed=0)
        env.knob = knob
        action, _ = model.predict(np.array([knob / 4, 1.0], np.float32), deterministic=True)
        env.step(action)
        assert env.knob == BEST


def test_advantages_by_hand():
    """Discount .9, lambda .8: with rewards 1, 2, 3, values .5, 1, 1.5, and 2 beyond the end."""
    buffer = RolloutBuffer(3, OneKnob().observation_space, OneKnob().action_space, gamma=0.9, gae_lambda=0.8)
    for step, (reward, value) in enumerate([(1.0, 0.5), (2.0, 1.0), (3.0, 1.5)]):
        buffer.add(
            np.zeros((1, 2)),
            np.zeros((1, 1)),
            np.array([reward]),
            np.array([float(step == 0)]),
            torch.tensor([value]),
            torch.zeros(1),
        )
    buffer.compute_returns_and_advantage(torch.tensor([2.0]), np.array([0.0]))
    delta = [1 + 0.9 * 1 - 0.5, 2 + 0.9 * 1.5 - 1, 3 + 0.9 * 2 - 1.5]
    third = delta[2]
    second = delta[1] + 0.9 * 0.8 * third
    first = delta[0] + 0.9 * 0.8 * second
    assert buffer.advantages.flatten().tolist() == pytest.approx([first, second, third], rel=1e-6)
    assert buffer.returns.flatten().tolist() == pytest.approx([first + 0.5, second + 1, third + 1.5])


def test_a_resumed_training_goes_on_where_it_stopped(small, normalization, one_knob, tmp_path):
    model = build_model(small, one_knob, normalization, seed=1)
    assert tune(model, tmp_path, 1024)
    resumed = build_model(small, one_knob, normalization, seed=2)
    load_checkpoint(resumed, tmp_path / "checkpoint.pt")
    assert resumed.num_timesteps == 1024
    for name, tensor in model.policy.state_dict().items():
        assert torch.equal(tensor, resumed.policy.state_dict()[name]), name
    moments = [m.policy.optimizer.state_dict()["state"][0]["exp_avg"] for m in (model, resumed)]
    assert torch.equal(*moments)
    seen = []
    assert tune(resumed, tmp_path, 2048, on_pause=seen.append)
    assert seen == [2048]


def test_an_interrupt_keeps_a_checkpoint(small, normalization, one_knob, tmp_path):
    steps = []
    watch = Watch(lambda: len(steps) > 200, lambda progress: steps.append(progress.steps))
    model = build_model(small, one_knob, normalization, seed=1)
    assert not tune(model, tmp_path, 4096, watch=watch)
    resumed = build_model(small, one_knob, normalization, seed=1)
    load_checkpoint(resumed, tmp_path / "checkpoint.pt")
    assert 0 < resumed.num_timesteps < 1024


def test_nan_rewards_are_refused_by_name(small, normalization, tmp_path):
    model = build_model(small, DummyVecEnv([BrokenReward] * 2), normalization, seed=1)
    with pytest.raises(TrainingError, match=r"reward=nan \(latency_savings=nan\) is invalid.*--resume"):
        tune(model, tmp_path, 1024)
    load_checkpoint(model, tmp_path / "checkpoint.pt")


def test_a_killed_worker_is_a_clear_error_with_a_checkpoint(small, tmp_path):
    env = SubprocVecEnv([partial(gymnasium.make, "CartPole-v1")] * 2)
    normalization = Normalization(mean=np.zeros(4, np.float32), std=np.ones(4, np.float32))
    model = build_model(small, env, normalization, seed=1)
    victim = env.processes[1].pid

    def kill(progress):
        if progress.steps == 300:
            os.kill(victim, signal.SIGKILL)

    with pytest.raises(TrainingError, match=rf"{victim} with code -9.*--resume"):
        tune(model, tmp_path, 4096, watch=Watch(on_progress=kill))
    env.processes[0].kill()
    load_checkpoint(model, tmp_path / "checkpoint.pt")
    assert model.num_timesteps >= 300


def test_a_checkpoint_that_cannot_be_written_says_why(small, normalization, one_knob, tmp_path):
    model = build_model(small, one_knob, normalization, seed=1)
    with pytest.raises(
        TrainingError, match=r"missing/checkpoint\.pt cannot be written: No such file.*--resume"
    ):
        save_checkpoint(model, tmp_path / "missing" / "checkpoint.pt")


def test_a_checkpoint_of_other_networks_is_refused(small, normalization, one_knob, tmp_path):
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(build_model(small, one_knob, normalization, seed=1), path)
    other = build_model(small.with_(clone={"hidden": (8, 8)}), one_knob, normalization, seed=1)
    with pytest.raises(TrainingError, match="no checkpoint of this training"):
        load_checkpoint(other, path)
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(TrainingError, match="no checkpoint of this training"):
        load_checkpoint(other, path)


def test_nothing_is_left_in_the_temporary_folder_of_the_system(
    small, normalization, one_knob, tmp_path, monkeypatch
):
    system = tmp_path / "system"
    system.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(system))
    assert tune(build_model(small, one_knob, normalization, seed=1), tmp_path, 64)
    assert list(system.iterdir()) == []


def test_the_reward_shown_is_the_mean_of_the_rollout(small, normalization, tmp_path):
    watch = Watch()
    assert math.isnan(watch.reward)
    env = DummyVecEnv(
        [partial(OneKnob, 1000)] * 2
    )  # of episodes that it does not end: no bootstrapped rewards
    model = build_model(small, env, normalization, seed=1)
    tune(model, tmp_path, 128, watch=watch)
    assert watch.reward == pytest.approx(float(model.rollout_buffer.rewards.mean()), rel=1e-5)
