"""The Gymnasium environments `KVCacheTuning-v0` and `LiveKVCacheTuning-v0`."""

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from kvpilot.engine.errors import ConfigError
from kvpilot.env.observation import Observation
from kvpilot.env.slo import Slo
from kvpilot.env.tuning.actions import DEFAULT_GRIDS, Absolute, Action, Actions
from kvpilot.env.tuning.episode import Episode
from kvpilot.env.tuning.reward import Reward
from kvpilot.env.tuning.rollout import start_run
from kvpilot.env.tuning.run import EpisodeRun, Step
from kvpilot.env.tuning.session import Session, SessionError
from kvpilot.env.tuning.vector import FEATURES, Stack, Vector, vectorize
from kvpilot.env.tuning.workload import Workload


class TuningEnv(gym.Env[Vector, Any]):
    """What both environments share: spaces, and a step over a run."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - as Gymnasium declares it
    _seen: Observation  # in the step before

    def __init__(self, *, actions: Actions | None, decide_every: int) -> None:
        if decide_every < 1:
            raise ConfigError(f"decide_every={decide_every!r} is invalid: expected >= 1")
        self.actions = actions or Absolute(DEFAULT_GRIDS)
        self.decide_every = decide_every
        self.observation_space = spaces.Box(0.0, 1.0, (len(FEATURES),), np.float32)
        sizes = self.actions.sizes
        self.action_space = (
            spaces.Discrete(sizes[0]) if len(sizes) == 1 else spaces.MultiDiscrete(list(sizes))
        )
        self._run: EpisodeRun | None = None

    @property
    def run(self) -> EpisodeRun:
        """The run under way. Raises ConfigError before the first reset."""
        if self._run is None:
            raise ConfigError("the environment has no episode: call reset first")
        return self._run

    def step(self, action: Action) -> tuple[Vector, float, bool, bool, dict[str, Any]]:
        run, session = self.run, self.run.session
        changes = self.actions.changes(action, session.knobs, session.bounds)
        try:
            step = run.step(changes, self.decide_every)
        except SessionError as error:
            return self._failed(error)
        self._seen = step.observation
        return self._vector(), step.reward, False, run.is_done, self._info(step)

    def _failed(self, error: SessionError) -> tuple[Vector, float, bool, bool, dict[str, Any]]:
        """The episode ends where the engine failed; the last observation stands."""
        return self._vector(), self.run.reward.on_failure(), True, False, {"error": str(error)}

    def _begin(self, run: EpisodeRun) -> tuple[Vector, dict[str, Any]]:
        self._run, self._seen = run, run.first
        return self._vector(), self._info(None)

    def _vector(self) -> Vector:
        return vectorize(self._seen, self.run.session.knobs, self.run.session.bounds)

    def _info(self, step: Step | None) -> dict[str, Any]:
        info: dict[str, Any] = {"knobs": dict(self.run.session.knobs), "observation": self._seen}
        if step is not None:
            info["changes"] = sum(record.changes for record in step.records)
            info["reward_parts"] = {
                name: sum(getattr(r.reward, name) for r in step.records) / len(step.records)
                for name in step.records[0].reward._fields
            }
        return info


class KVCacheTuningEnv(TuningEnv):
    """Tune an LLM server's KV cache while it serves replayed traffic: a simulation of the real engine.

    Description
        One step is one decision: knobs are set, then `decide_every` windows of the episode's interval (60 s) pass.
    Action
        As `actions` says (default: `Absolute(DEFAULT_GRIDS)`): one number, or one per knob. 0 holds.
    Observation
        float32[len(FEATURES)] in [0, 1]; docs/environment.md has the table. It covers the whole step.
    Reward
        Mean over the step's windows of `reward` (default: `ObjectiveReward()`); parts in `info["reward_parts"]`.
    Start
        An episode drawn from `workload` with the reset's seed, or `options={"episode": Episode}`, after its warm-up
        with default knobs.
    End
        Truncated after the episode's seconds; never terminated.
    Info
        knobs (requested), observation (an Observation), reward_parts, changes (knobs changed); episode, at reset.
        All of it is small: it crosses the pipes of vectorised environments.

    Version history: v0, first version.
    """

    def __init__(
        self,
        workload: Workload | None = None,
        *,
        actions: Actions | None = None,
        reward: Reward | None = None,
        decide_every: int = 2,
    ) -> None:
        super().__init__(actions=actions, decide_every=decide_every)
        self.workload, self._reward = workload, reward
        self.episode: Episode | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Vector, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode = self._choose(options or {})
        observation, info = self._begin(start_run(self.episode, reward=self._reward))
        return observation, {**info, "episode": self.episode}

    def _choose(self, options: dict[str, Any]) -> Episode:
        episode = options.get("episode")
        if isinstance(episode, Episode):
            return episode
        if episode is not None or self.workload is None:
            raise ConfigError(
                f'options["episode"]={episode!r} is invalid: expected an Episode, or a workload'
            )
        return self.workload.draw(int(self.np_random.integers(1 << 31)))


class LiveKVCacheTuningEnv(TuningEnv):
    """The same spaces over a running engine. Real time passes; no reference is known, so no latency savings are
    rewarded. `connect` gives a session at each reset. Terminated with `reward.on_failure()` where the engine fails;
    truncated after `max_windows` windows, if given."""

    def __init__(
        self,
        connect: Callable[[], Session],
        *,
        actions: Actions | None = None,
        reward: Reward | None = None,
        decide_every: int = 2,
        interval_seconds: float = 60.0,
        slo: Slo | None = None,
        max_windows: int | None = None,
    ) -> None:
        super().__init__(actions=actions, decide_every=decide_every)
        self._connect, self._reward = connect, reward
        self._interval_seconds, self._slo = interval_seconds, slo or Slo()
        self._max_windows = max_windows

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Vector, dict[str, Any]]:
        super().reset(seed=seed)
        session = self._connect()
        interval = self._interval_seconds
        return self._begin(EpisodeRun(session, interval_seconds=interval, slo=self._slo, reward=self._reward))

    def step(self, action: Action) -> tuple[Vector, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        at_end = self._max_windows is not None and self.run.num_windows >= self._max_windows
        return observation, reward, terminated, truncated or at_end, info


class StackObservations(gym.Wrapper[Vector, Any, Vector, Any]):
    """The last `depth` observations, oldest first, and running averages as one vector; see Stack."""

    def __init__(self, env: gym.Env[Vector, Any], depth: int = 3, averages: Sequence[float] = ()) -> None:
        super().__init__(env)
        self.stack = Stack(depth, averages)
        box = env.observation_space
        assert isinstance(box, spaces.Box)
        copies = self.stack.copies
        self.observation_space = spaces.Box(
            np.tile(box.low, copies), np.tile(box.high, copies), dtype=np.float32
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Vector, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        self.stack.reset()
        return self.stack.push(observation), info

    def step(self, action: Any) -> tuple[Vector, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self.stack.push(observation), reward, terminated, truncated, info


gym.register(id="KVCacheTuning-v0", entry_point=f"{__name__}:KVCacheTuningEnv")
gym.register(id="LiveKVCacheTuning-v0", entry_point=f"{__name__}:LiveKVCacheTuningEnv")
