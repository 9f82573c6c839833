import io
import random

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from rich.console import Console

from kvpilot.agent.evaluation.runs import workload_hash
from kvpilot.agent.policies.hysteresis import HysteresisConfig
from kvpilot.agent.training.config import TrainConfig
from kvpilot.agent.training.networks import Normalization
from kvpilot.agent.training.request import TrainRequest
from kvpilot.agent.training.screen import Screen
from kvpilot.agent.tune.result import Setting, TunedResult

from ..tuning.conftest import cache, folder, profile, workload  # noqa: TID252 - one small workload, not two

__all__ = ["cache", "folder", "profile", "workload"]  # fixtures: a small workload of hand-made sessions
BEST = 3


class OneKnob(gymnasium.Env):
    """One knob with the values 0 to 4; reward falls with its distance from BEST. Action n sets n - 1, 0 holds."""

    def __init__(self, length: int = 16) -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(6)
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.knob, self.step_number = int(self.np_random.integers(5)), 0
        return self._observe(), {}

    def step(self, action):
        if action:
            self.knob = int(action) - 1
        self.step_number += 1
        return self._observe(), self.reward(), False, self.step_number >= self.length, {}

    def reward(self) -> float:
        return 1.0 - abs(self.knob - BEST) / 2

    def _observe(self):
        return np.array([self.knob / 4, 1.0], np.float32)


class BrokenReward(OneKnob):
    def reward(self) -> float:
        return float("nan")

    def step(self, action):
        observation, reward, terminated, truncated, _ = super().step(action)
        info = {"reward_parts": {"hit": 0.5, "latency_savings": float("nan")}}
        return observation, reward, terminated, truncated, info


@pytest.fixture
def small() -> TrainConfig:
    """Learns fast from nothing, unlike the defaults, which start from a clone."""
    return TrainConfig(seeds=1).with_(
        environment={"averages": ()},
        clone={"members": 1, "hidden": (16,), "epochs": 100, "learning_rate": 3e-3, "input_noise": 0.1},
        ppo={"envs": 2, "rollout_steps": 64, "batch_size": 64, "epochs": 10, "steps": 4096}
        | {"learning_rate": 3e-3, "clip": 0.2, "target_kl": 0.2, "discount": 0.8},
    )


@pytest.fixture
def normalization() -> Normalization:
    return Normalization(mean=np.array([0.5, 0.9], np.float32), std=np.array([0.4, 1.0], np.float32))


@pytest.fixture(autouse=True)
def one_thread_and_own_randomness():
    """stable-baselines3 seeds the process-wide generators: leave them as they were."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


LEVELS = [{"ttl_seconds": 20.0, "size_factor": 0.5, "max_batch": 8, "kv_level": k} for k in range(3)]


@pytest.fixture
def tuned(tmp_path, workload):
    settings = [Setting(name=f"level-{k}", knobs=LEVELS[k], regime="any", score=0.5) for k in (1, 0, 2)]
    path = tmp_path / "tuned.json"
    TunedResult(
        workload="small",
        seeds={},
        hashes={workload.name: workload_hash(workload)},
        static_best=settings[0],
        portfolio=tuple(settings),
        hysteresis=HysteresisConfig(calm=LEVELS[1], pressure=LEVELS[2], high=4.0, low=1.0),
    ).write(path)
    return path


SMALLEST = TrainConfig(seeds=1, workers=1).with_(
    environment={"stack": 2, "decide_every": 1},
    demonstrations={"rounds": 2, "episodes": 2, "label_every": 2, "horizon_seconds": 20.0},
    clone={"members": 2, "hidden": (8,), "epochs": 20},
    ppo={"envs": 1, "steps": 32, "rollout_steps": 16, "batch_size": 16, "epochs": 2},
    selection={"episodes": 1, "every_steps": 16},
)


@pytest.fixture
def make_request(tmp_path, tuned, workload):
    def make(config=SMALLEST, out="out"):
        return TrainRequest(
            config=config,
            tuned_path=tuned,
            workloads={workload.name: workload},
            out=tmp_path / out,
            command="autotune train",
        )

    return make


@pytest.fixture
def screen():
    return Screen(Console(file=io.StringIO()))
