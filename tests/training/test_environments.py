"""The environments that PPO learns in: what they draw, what they hand on, and how they fail."""

import math
from dataclasses import replace

import numpy as np
import pytest

from kvpilot.agent.training.environments import EpisodePool, make_environments
from kvpilot.agent.training.errors import TrainingError
from kvpilot.agent.training.fine_tuning import Watch, fine_tune
from kvpilot.agent.training.rounds import cloned, demonstrate
from kvpilot.env.tuning.environment import KVCacheTuningEnv
from kvpilot.env.tuning.reward import ObjectiveReward
from kvpilot.env.tuning.vector import FEATURES


class UnmeasuredLater(ObjectiveReward):
    """From the third window on the quality loss of a codec is unknown."""

    def reset(self):
        super().reset()
        self.num = 0

    def update(self, window, observation, reference, changes=0):
        self.num += 1
        if self.num > 2:
            observation = replace(observation, quality_loss=None)
        return super().update(window, observation, reference, changes)


@pytest.fixture
def make_pool(make_request):
    def make(reward=None, seed=0):
        request = make_request()
        core = KVCacheTuningEnv(actions=request.actions, reward=reward, decide_every=1)
        return EpisodePool(core, [request.training_episode(k) for k in range(3)], [seed])

    return make


def test_episodes_are_drawn_by_seed(make_pool):
    def firsts(seed):
        pool = make_pool(seed=seed)
        return [pool.reset()[0].tolist() for _ in range(5)]

    assert firsts(1) == firsts(1)
    assert len({tuple(first) for first in firsts(1)}) > 1


def test_a_reward_that_is_no_number_is_named(make_pool):
    pool = make_pool(UnmeasuredLater())
    pool.reset()
    assert math.isfinite(pool.step(0)[1])
    pool.step(0)
    _, reward, terminated, _, info = pool.step(0)
    assert math.isnan(reward)
    assert terminated
    assert "quality=nan" in info["error"]


def test_ppo_refuses_it_by_name_and_keeps_a_checkpoint(make_request, screen, tmp_path, monkeypatch):
    request = make_request()
    data = demonstrate(request, screen, lambda: False)
    model, _ = cloned(request, data, seed=0)
    monkeypatch.setattr("kvpilot.agent.training.environments.ObjectiveReward", UnmeasuredLater)
    env = make_environments(
        request.config, request.actions, request.weights, [request.training_episode(0)], [0]
    )
    model.set_env(env)
    checkpoint = tmp_path / "checkpoint.pt"
    with pytest.raises(TrainingError, match=r"quality=nan.*--resume"):
        fine_tune(model, steps=64, every_steps=32, checkpoint=checkpoint, watch=Watch())
    assert checkpoint.exists()


def test_several_environments_run_in_processes_and_are_stacked(make_request):
    request = make_request()
    config = request.config.with_(
        ppo={"envs": 2, "rollout_steps": 16, "batch_size": 16}, environment={"stack": 2, "averages": (3.0,)}
    )
    env = make_environments(
        config, request.actions, request.weights, [request.training_episode(k) for k in range(2)], [0]
    )
    try:
        first = env.reset()
        assert isinstance(first, np.ndarray)
        assert first.shape == (2, 3 * len(FEATURES))
        later, rewards, _, infos = env.step(np.array([1, 2]))
        assert isinstance(later, np.ndarray)
        assert (later[:, : len(FEATURES)] == first[:, len(FEATURES) : 2 * len(FEATURES)]).all()
        assert np.isfinite(rewards).all()
        assert {"hits", "quality", "total"} <= set(infos[0]["reward_parts"])
    finally:
        env.close()
