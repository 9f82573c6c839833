"""Observing: a window from the source, how old it is, and what is wrong with it."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from kvpilot.agent.control.signals import reuse_seconds, signals_of, slo_of
from kvpilot.agent.guard import Reason, Refusal, SloLimits
from kvpilot.env.observation import Observation, observe
from kvpilot.exporter.source import NoHistoryError, Source, SourceError


class Seen(NamedTuple):
    """Without an observation `problems` says why."""

    problems: list[Refusal]
    observation: Observation | None = None
    age_seconds: float = 0.0
    signals: Mapping[str, float | None] = MappingProxyType({})
    reuse_seconds: float | None = None


class Observer:
    """Compares the clock of the observations with the loop's: the smallest difference ever seen is taken for none."""

    def __init__(self, source: Source, clock: Callable[[], float]) -> None:
        self.source, self._clock = source, clock
        self.windows_seen = 0  # since the loop or the engine started
        self.failures = 0  # windows in a row that could not be had
        self._offset = math.inf  # this clock minus theirs, as small as ever seen

    def look(self, window_seconds: float, slo: SloLimits) -> Seen:
        try:
            window = self.source.window(window_seconds)
        except NoHistoryError as error:
            self.failures = 0
            return Seen([Refusal(Reason.WARMUP, None, str(error))])
        except SourceError as error:
            self.failures += 1
            return Seen([Refusal(Reason.SOURCE, None, str(error))])
        self.failures = 0
        if window.is_reset():
            self.windows_seen, self._offset = 0, math.inf
            detail = "a counter went down: the engine restarted"
            return Seen([Refusal(Reason.RESET, None, detail)])
        now = self._clock()
        self._offset = min(self._offset, now - window.end.time)
        self.windows_seen += 1
        observation = observe(window, slo_of(slo))
        return Seen(
            [],
            observation,
            age_seconds=now - self._offset - window.end.time,
            signals=signals_of(window, observation),
            reuse_seconds=reuse_seconds(window),
        )
