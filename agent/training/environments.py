"""The processes in which PPO gathers experience."""

import math
import signal
from collections.abc import Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

from kvpilot.agent.training.config import TrainConfig
from kvpilot.engine.errors import KVPilotError
from kvpilot.env.tuning.actions import Actions
from kvpilot.env.tuning.environment import KVCacheTuningEnv, StackObservations
from kvpilot.env.tuning.episode import Episode
from kvpilot.env.tuning.reward import ObjectiveReward, RewardWeights
from kvpilot.env.tuning.vector import Vector


class EpisodePool(gymnasium.Wrapper[Vector, Any, Vector, Any]):
    """Draws from a fixed set of episodes, whose references are known; hands on only what training reads.

    What the simulation refuses to go on with becomes a reward that is no number, with `error` in its info: an
    exception would end the process without a word to the one that trains.
    """

    def __init__(self, env: gymnasium.Env[Vector, Any], episodes: Sequence[Episode], seed: list[int]) -> None:
        super().__init__(env)
        self.episodes = list(episodes)
        self._rng = np.random.default_rng(seed)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Vector, dict[str, Any]]:
        episode = self.episodes[int(self._rng.integers(len(self.episodes)))]
        observation, _ = self.env.reset(seed=seed, options={"episode": episode})
        return observation, {}

    def step(self, action: Any) -> tuple[Vector, Any, bool, bool, dict[str, Any]]:
        try:
            observation, reward, terminated, truncated, info = self.env.step(action)
        except KVPilotError as error:
            nothing = np.zeros(self.observation_space.shape or (), np.float32)
            return nothing, math.nan, True, False, {"error": str(error)}
        return observation, reward, terminated, truncated, {"reward_parts": info.get("reward_parts")}


def make_environments(
    config: TrainConfig,
    actions: Actions,
    weights: RewardWeights,
    episodes: Sequence[Episode],
    seed: list[int],
) -> VecEnv:
    """`config.ppo.envs` of them, in processes of their own where there are several."""
    ranks = range(config.ppo.envs)
    makers = [partial(_make, config, actions, weights, list(episodes), [*seed, rank]) for rank in ranks]
    return (
        DummyVecEnv(makers) if len(makers) == 1 else SubprocVecEnv([partial(_alone, make) for make in makers])
    )


def _make(
    config: TrainConfig, actions: Actions, weights: RewardWeights, episodes: list[Episode], seed: list[int]
) -> gymnasium.Env[Vector, Any]:
    environment = config.environment
    reward = ObjectiveReward(weights)
    core = KVCacheTuningEnv(actions=actions, reward=reward, decide_every=environment.decide_every)
    return Monitor(
        StackObservations(EpisodePool(core, episodes, seed), environment.stack, environment.averages)
    )


def _alone(make: Any) -> gymnasium.Env[Vector, Any]:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    return make()
