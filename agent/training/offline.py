"""Spaces without an environment behind them: what building and cloning a network needs."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv

from kvpilot.agent.training.errors import TrainingError


class OfflineEnv(gymnasium.Env[np.ndarray, Any]):
    """It has spaces; stepping it is a mistake."""

    def __init__(self, num_inputs: int, sizes: Sequence[int]) -> None:
        self.observation_space = spaces.Box(0.0, 1.0, (num_inputs,), np.float32)
        self.action_space = (
            spaces.Discrete(sizes[0]) if len(sizes) == 1 else spaces.MultiDiscrete(list(sizes))
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        raise TrainingError("a cloned model has no environment: give it one with set_env")

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        raise TrainingError("a cloned model has no environment: give it one with set_env")


def offline_vector(num_inputs: int, sizes: Sequence[int], number: int) -> DummyVecEnv:
    return DummyVecEnv([partial(OfflineEnv, num_inputs, sizes)] * number)
