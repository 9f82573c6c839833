"""PPO from a cloned start, in small steps, with checkpoints; what it may die of is said by name."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv

from kvpilot.agent.training.checkpoints import save_checkpoint
from kvpilot.agent.training.errors import TrainingError
from kvpilot.agent.training.networks import Model

WORKER_LOST = (EOFError, BrokenPipeError, ConnectionResetError)


class Progress(NamedTuple):
    """`reward` is the mean per decision of the last rollouts, NaN before the first."""

    steps: int
    reward: float


class Watch(BaseCallback):
    """Ends training when asked to, refuses rewards that are no numbers, tells how it goes."""

    def __init__(
        self,
        is_interrupted: Callable[[], bool] = lambda: False,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        super().__init__()
        self.is_interrupted, self.on_progress = is_interrupted, on_progress
        self.reward = math.nan
        self._sum, self._num = 0.0, 0

    def _on_step(self) -> bool:
        rewards = np.asarray(self.locals["rewards"])
        if not np.isfinite(rewards).all():
            env = int(np.flatnonzero(~np.isfinite(rewards))[0])
            raise TrainingError(_bad_reward(float(rewards[env]), self.locals["infos"][env]))
        self._sum, self._num = self._sum + float(rewards.sum()), self._num + rewards.size
        if self.on_progress:
            self.on_progress(Progress(self.num_timesteps, self.reward))
        return not self.is_interrupted()

    def _on_rollout_end(self) -> None:
        self.reward = self._sum / max(self._num, 1)
        self._sum, self._num = 0.0, 0
        self.logger.record("rollout/reward_per_decision", self.reward)


def fine_tune(
    model: Model,
    *,
    steps: int,
    every_steps: int,
    checkpoint: Path,
    watch: Watch,
    on_pause: Callable[[int], None] | None = None,
) -> bool:
    """Up to `steps` in all, those before a resume included; True if it got there.

    Writes `checkpoint` every `every_steps`, then calls `on_pause` with the steps made. Raises TrainingError if a
    process of the environment dies or a reward is not finite; the checkpoint is written before.
    """
    while model.num_timesteps < steps and not watch.is_interrupted():
        wanted = min(every_steps, steps - model.num_timesteps)
        try:
            model.learn(wanted, callback=watch, reset_num_timesteps=False)
        except WORKER_LOST as error:
            save_checkpoint(model, checkpoint)
            raise TrainingError(lost(model.get_env(), checkpoint)) from error
        except TrainingError as error:
            save_checkpoint(model, checkpoint)
            raise TrainingError(f"{error}; {_resume(checkpoint)}") from error
        save_checkpoint(model, checkpoint)
        if on_pause and not watch.is_interrupted():
            on_pause(model.num_timesteps)
    return model.num_timesteps >= steps


def lost(env: VecEnv | None, checkpoint: Path) -> str:
    """What to say where processes of `env` (None: while they were started) are gone."""
    processes = env.processes if isinstance(env, SubprocVecEnv) else []
    for process in processes:
        process.join(timeout=5)
    ended = [f"{p.pid} with code {p.exitcode}" for p in processes if p.exitcode is not None]
    which = f" ({', '.join(ended)})" if ended else ""
    return (
        f"a process that simulates the environment ended{which}: killed for memory, or failed with the "
        f"traceback above; {_resume(checkpoint)}"
    )


def _resume(checkpoint: Path) -> str:
    return f"the training so far is in {checkpoint}: go on with --resume"


def _bad_reward(reward: float, info: dict[str, object]) -> str:
    if "error" in info:
        return str(info["error"])
    parts = info.get("reward_parts")
    bad = []
    if isinstance(parts, dict):
        bad = [f"{name}={value!r}" for name, value in parts.items() if not _is_finite(value)]
    named = f" ({', '.join(bad)})" if bad else ""
    return f"reward={reward!r}{named} is invalid: expected a finite number; see the reward's weights and the trace"


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
