"""What the simulated engine does, compiled where that is possible (see engine/compiled.py)."""

from math import inf
from typing import NamedTuple

from kvpilot.engine.compiled import mypyc_attr
from kvpilot.engine.config import EngineConfig
from kvpilot.engine.core import EngineCore
from kvpilot.engine.kv.eviction import EvictionPolicy
from kvpilot.engine.kv.formats import PageShape
from kvpilot.engine.kv.storage import CountingStorage, NoStorage
from kvpilot.engine.request import Request, SampledToken, ScheduledRequest
from kvpilot.engine.step_features import FeatureReader
from kvpilot.env.simulator.clock import VirtualClock
from kvpilot.env.simulator.latency import LatencyProfile


class SimulatedRunner:
    """Takes the time that the profile says, on the clock. Draws no tokens."""

    def __init__(self, profile: LatencyProfile, clock: VirtualClock, ladder: tuple[str, ...]) -> None:
        self._cost = profile.step_cost(ladder)
        self._clock = clock
        self.features: FeatureReader | None = None

    def execute(self, batch: list[ScheduledRequest]) -> list[SampledToken | None]:
        self._clock.now += self.read_step(batch).seconds
        return [None] * len(batch)

    def read_step(self, batch: list[ScheduledRequest]) -> "StepTime":
        assert self.features is not None
        features = self.features.read(batch)
        one_off = features.moved_bytes > 0 or any(features.converted)
        return tuple.__new__(StepTime, (self._cost.seconds(features), one_off))


class StepTime(NamedTuple):
    """`is_one_off`: the step pays for pages converted or moved before it; the next one takes less."""

    seconds: float
    is_one_off: bool


@mypyc_attr(allow_interpreted_subclasses=True)
class SimulatedCore(EngineCore):
    """Decides what the engine decides. Equal decode steps between two events are booked at once.

    `next_event` is the moment of the next arrival or knob change, kept up to date by whoever feeds requests:
    no step that starts at it or later is skipped over.
    """

    def __init__(
        self,
        config: EngineConfig,
        shape: PageShape,
        profile: LatencyProfile,
        clock: VirtualClock,
        *,
        policy: EvictionPolicy | None = None,
        model_max_len: int = 1 << 30,
        quality_loss: dict[str, float] | None = None,
    ) -> None:
        storage = CountingStorage(NoStorage(), len(config.ladder))
        self._virtual = clock
        self._simulated = SimulatedRunner(profile, clock, config.ladder)
        super().__init__(
            config,
            shape,
            self._simulated,
            storage,
            model_max_len=model_max_len,
            quality_loss=quality_loss,
            policy=policy,
            clock=clock,
        )
        self._simulated.features = FeatureReader(self.pool, storage)
        self.next_event = inf

    def advance(self, until: float) -> list[Request]:
        """Step until requests end (these are returned), none is left, or a step would start at `until` or later."""
        self.next_event = until
        while self.has_work() and self._virtual.now < until:
            ended = [output.request for output in self.step() if output.finish_reason is not None]
            if ended:
                return ended
        return []

    def _run(self, batch: list[ScheduledRequest], start: float) -> tuple[list[SampledToken | None], int]:
        step = self._simulated.read_step(batch)
        repeats = 1 if step.is_one_off else self._quiet_steps(batch, start, step.seconds)
        self._virtual.now = start + repeats * step.seconds
        return [None] * len(batch), repeats

    def _quiet_steps(self, batch: list[ScheduledRequest], start: float, seconds: float) -> int:
        """Steps until something may be decided. A step at `next_event` sees it, one at a deadline does not yet."""
        if self.is_reclaiming:
            return 1
        quiet = self.scheduler.quiet_steps(batch, start)
        if quiet == 1:
            return 1
        deadline = self.scheduler.next_deadline()
        before_event = -((start - self.next_event) // seconds) if self.next_event < inf else quiet
        before_deadline = (deadline - start) // seconds + 1 if deadline < inf else quiet
        return max(int(min(quiet, before_event, before_deadline)), 1)
