"""The threshold policy: two regimes, two sets of knobs. It only wishes: the guard decides what becomes of it."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvpilot.agent.policies.changes import only_changed
from kvpilot.engine.config import KnobBounds
from kvpilot.env.observation import Observation
from kvpilot.env.policy import KnobValues, Proposal


@dataclass(frozen=True, kw_only=True)
class ThresholdConfig:
    """Two regimes. Round numbers, set by hand: pressure_ttl_seconds and calm_size_factor after a run of the demo."""

    pressure_oldest_seconds: float = 2.0  # the oldest waiting request waits longer than this, or
    pressure_mean_seconds: float = 1.0  # the queue's mean age is above this, or
    pressure_live_share: float = 0.85  # running requests hold more of the pool than this, or any preemption
    calm_live_share: float = 0.60  # calm: nothing waits, no preemption, and running requests hold less
    calm_decisions: int = 3  # so many decisions in a row, before the regime returns to calm
    pressure_ttl_seconds: float = 20.0  # enough for who comes back soon; the pages of ended chats go early
    pressure_size_factor: float = 0.6
    calm_ttl_seconds: float = 300.0
    calm_size_factor: float = 0.5  # at level 0 retained pages cannot shrink: leave a burst room to start in
    batch_growth: float = 1.5  # of max_batch: while requests wait and memory is not what they wait for
    batch_shrink: float = 0.75  # of max_batch: after preemptions, which waste the work already done
    batch_room_share: float = 0.70  # memory is not what they wait for: running requests hold less than this


class ThresholdPolicy:
    """Pressure: step pages down as far as the ladder goes, retain less, fit max_batch to the memory.
    Calm: no new step-downs (level 0) and longer retention; max_batch stays."""

    name = "threshold"

    def __init__(self, config: ThresholdConfig | None = None) -> None:
        self.config = config or ThresholdConfig()
        self.reset()

    def reset(self) -> None:
        self.under_pressure = False
        self._calm_in_a_row = 0

    def propose(
        self, observation: Observation, knobs: KnobValues, bounds: Mapping[str, KnobBounds]
    ) -> Proposal:
        why = self._update_regime(observation)
        config = self.config
        if not self.under_pressure:
            calm = {"ttl_seconds": config.calm_ttl_seconds, "size_factor": config.calm_size_factor}
            return Proposal(only_changed({"kv_level": 0, **calm}, knobs), f"calm: {why}")
        wanted: dict[str, float] = {
            "kv_level": bounds["kv_level"].high,
            "ttl_seconds": config.pressure_ttl_seconds,
            "size_factor": config.pressure_size_factor,
        }
        batch, batch_why = self._fit_batch(observation, knobs["max_batch"], bounds["max_batch"])
        wanted["max_batch"] = batch
        return Proposal(only_changed(wanted, knobs), f"pressure: {why}{batch_why}")

    def _update_regime(self, observation: Observation) -> str:
        """Enters pressure at once, leaves it after `calm_decisions`; returns the signal in words."""
        signal = self._pressure_signal(observation)
        if signal:
            self.under_pressure, self._calm_in_a_row = True, 0
            return signal
        calm = not observation.waiting and _number(observation.live_share) < self.config.calm_live_share
        self._calm_in_a_row = self._calm_in_a_row + 1 if calm else 0
        if self._calm_in_a_row >= self.config.calm_decisions:
            self.under_pressure = False
        live = f"running requests hold {_number(observation.live_share):.0%} of the pool"
        if not self.under_pressure:
            return f"{observation.waiting:g} waiting, {live}"
        return f"easing, calm {self._calm_in_a_row} of {self.config.calm_decisions} times, {live}"

    def _pressure_signal(self, observation: Observation) -> str | None:
        config = self.config
        mean, oldest = _number(observation.waiting_mean_seconds), _number(observation.waiting_oldest_seconds)
        if observation.preemptions:
            return f"{observation.preemptions:g} preemptions"
        if oldest > config.pressure_oldest_seconds:
            return f"oldest of {observation.waiting:g} waits {oldest:.1f} s"
        if mean > config.pressure_mean_seconds:
            return f"{observation.waiting:g} wait {mean:.1f} s on average"
        if _number(observation.live_share) > config.pressure_live_share:
            return f"running requests hold {observation.live_share:.0%} of the pool"
        return None

    def _fit_batch(self, observation: Observation, batch: float, limit: KnobBounds) -> tuple[float, str]:
        if observation.preemptions:
            shrunk = max(limit.low, int(batch * self.config.batch_shrink))
            return shrunk, "; smaller batch"
        crowded = _number(observation.live_share) >= self.config.batch_room_share
        full = _number(observation.running) >= batch
        if observation.waiting and full and not crowded:
            return min(limit.high, max(batch + 1, int(batch * self.config.batch_growth))), "; larger batch"
        return batch, ""


def _number(value: float | None) -> float:
    assert value is not None, "the guard lets no observation through that lacks a required signal"
    return value
