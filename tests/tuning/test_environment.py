"""The Gymnasium form: spaces, episodes, wrappers, many at once, and the live engine behind the same spaces."""

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from kvpilot.engine.errors import ConfigError
from kvpilot.env.tuning.actions import Delta, Portfolio, Setting
from kvpilot.env.tuning.environment import KVCacheTuningEnv, StackObservations
from kvpilot.env.tuning.reward import RewardError
from kvpilot.env.tuning.vector import FEATURES

PORTFOLIO = Portfolio(
    (
        Setting(name="calm", knobs={"kv_level": 0, "size_factor": 0.0, "ttl_seconds": 0.0}),
        Setting(name="press", knobs={"kv_level": 2, "size_factor": 0.6, "ttl_seconds": 30.0}),
    )
)


def play(env, seed, actions, options=None):
    seen = [env.reset(seed=seed, options=options)[0]]
    rewards = []
    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(action)
        seen.append(observation)
        rewards.append(reward)
        if terminated or truncated:
            break
    return np.array(seen), rewards


@pytest.mark.parametrize("actions", [PORTFOLIO, Delta(), None])
def test_it_is_a_gymnasium_environment(workload, actions):
    env = gym.make("KVCacheTuning-v0", workload=workload, actions=actions)
    check_env(env.unwrapped, skip_render_check=True)


def test_an_episode_is_the_seed_s_and_ends_with_it(workload):
    env = KVCacheTuningEnv(workload, actions=PORTFOLIO)
    first, rewards = play(env, 3, [2, 0, 1] * 9)
    again, same = play(env, 3, [2, 0, 1] * 9)
    other, _ = play(env, 4, [2, 0, 1] * 9)
    assert (first == again).all()
    assert rewards == same
    assert first.shape != other.shape or (first != other).any()
    assert env.episode is not None
    play(env, 3, [0] * 99)
    assert env.run.num_windows == env.episode.num_windows
    assert env.run.is_done


def test_an_episode_may_be_given(episode, workload):
    env = KVCacheTuningEnv(actions=PORTFOLIO)
    _, info = env.reset(options={"episode": episode})
    assert info["episode"] is episode
    assert info["knobs"]["kv_level"] == 0
    *_, info = env.step(2)
    assert info["knobs"]["kv_level"] == 2
    assert sum(
        info["reward_parts"][n] for n in ("hits", "latency", "slo", "quality", "churn")
    ) == pytest.approx(info["reward_parts"]["total"])
    assert info["changes"] == 3


def test_an_action_changes_what_is_observed(episode):
    env = KVCacheTuningEnv(actions=PORTFOLIO)
    ends = {}
    for action in (0, 2):
        observation, _ = env.reset(options={"episode": episode})
        for _ in range(4):
            observation, *_ = env.step(action)
        ends[action] = dict(zip(FEATURES, observation, strict=True))
    assert ends[0]["level_2_share"] == 0 < ends[2]["level_2_share"]
    assert ends[0]["knob_kv_level"] == 0
    assert ends[2]["knob_kv_level"] == 1


def test_misuse_is_said(workload):
    with pytest.raises(ConfigError, match="decide_every=0"):
        KVCacheTuningEnv(workload, decide_every=0)
    with pytest.raises(ConfigError, match="call reset first"):
        KVCacheTuningEnv(workload).step([0, 0, 0, 0])
    with pytest.raises(ConfigError, match="expected an Episode, or a workload"):
        KVCacheTuningEnv().reset()
    with pytest.raises(ConfigError, match="expected an Episode"):
        KVCacheTuningEnv(workload).reset(options={"episode": 3})


def test_a_reward_that_is_no_number_stops_the_run(episode, folder, profile):
    """A profile that does not say what int4 costs: the first window that reads such pages is an error."""
    unknown = replace(profile, quality_loss={"int8": 7e-5})
    unknown.write(folder / "unknown.json")
    env = KVCacheTuningEnv(actions=PORTFOLIO)
    unmeasured = replace(episode, profile=str(folder / "unknown.json"))
    with pytest.raises(RewardError, match="reward part quality=nan"):
        play(env, None, [2] * 6, options={"episode": unmeasured})


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_many_run_at_once(workload, kind):
    envs = kind([lambda: KVCacheTuningEnv(workload, actions=PORTFOLIO)] * 2)
    observations, _ = envs.reset(seed=[3, 4])
    assert observations.shape == (2, len(FEATURES))
    stepped, rewards, *_ = envs.step(np.array([2, 2]))
    envs.close()
    single = KVCacheTuningEnv(workload, actions=PORTFOLIO)
    for k, seed in enumerate((3, 4)):
        seen, alone = play(single, seed, [2])
        assert (observations[k] == seen[0]).all()
        assert (stepped[k] == seen[1]).all()
        assert rewards[k] == pytest.approx(alone[0])


def test_the_wrapper_stacks(workload):
    plain = KVCacheTuningEnv(workload, actions=PORTFOLIO)
    seen, _ = play(plain, 3, [2, 0, 0])
    stacked, _ = play(StackObservations(KVCacheTuningEnv(workload, actions=PORTFOLIO), 3), 3, [2, 0, 0])
    assert (stacked[0] == np.tile(seen[0], 3)).all()
    assert (stacked[3] == np.concatenate(seen[1:4])).all()
