"""An episode under control, window by window: what environment, rollout and look-ahead share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvpilot.engine.stats import StatsWindow
from kvpilot.env.observation import Observation, observe
from kvpilot.env.slo import Slo
from kvpilot.env.tuning.reference import ReferenceLatency
from kvpilot.env.tuning.reward import ObjectiveReward, Reward, RewardParts
from kvpilot.env.tuning.session import Session


@dataclass(frozen=True, kw_only=True)
class WindowRecord:
    """One window under control. `knobs` are the requested values in it, `changes` how many changed as it began."""

    index: int
    window: StatsWindow
    observation: Observation
    reward: RewardParts
    knobs: Mapping[str, float | int]
    changes: int


class Step(NamedTuple):
    """What came of one decision: `observation` spans all its windows, as a controller sees them."""

    observation: Observation
    records: tuple[WindowRecord, ...]

    @property
    def reward(self) -> float:
        """Mean of the windows."""
        return sum(record.reward.total for record in self.records) / len(self.records)


class EpisodeRun:
    """A session, its clock and its reward. `first` is what was seen in the interval before control began."""

    def __init__(
        self,
        session: Session,
        *,
        interval_seconds: float,
        slo: Slo,
        reward: Reward | None = None,
        reference: ReferenceLatency | None = None,
    ) -> None:
        self.session, self.interval_seconds, self.slo = session, interval_seconds, slo
        self.reward = reward or ObjectiveReward()
        self.reference = reference
        self.num_windows = 0  # done so far
        self.reward.reset()
        self.first = observe(session.advance(interval_seconds), slo)

    @property
    def is_done(self) -> bool:
        return self.session.is_done

    def step(self, changes: Mapping[str, object], windows: int = 1) -> Step:
        """Set knobs, then let up to so many windows pass (at least one). Raises KnobInvalidError, RewardError."""
        before = dict(self.session.knobs)
        self.session.set_knobs(changes)
        knobs = dict(self.session.knobs)
        num_changes = sum(knobs[name] != before[name] for name in knobs)
        records: list[WindowRecord] = []
        while not records or (len(records) < windows and not self.is_done):
            records.append(self._window(knobs, 0 if records else num_changes))
        whole = StatsWindow(start=records[0].window.start, end=records[-1].window.end)
        seen = records[0].observation if len(records) == 1 else observe(whole, self.slo)
        return Step(seen, tuple(records))

    def _window(self, knobs: Mapping[str, float | int], changes: int) -> WindowRecord:
        window = self.session.advance(self.interval_seconds)
        observation = observe(window, self.slo)
        reference = self.reference.at(self.num_windows) if self.reference else None
        parts = self.reward.update(window, observation, reference, changes)
        self.num_windows += 1
        return WindowRecord(
            index=self.num_windows - 1,
            window=window,
            observation=observation,
            reward=parts,
            knobs=knobs,
            changes=changes,
        )
