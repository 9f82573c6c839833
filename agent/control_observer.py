"""Observing: a window from the source, how old it is, and what is wrong with it."""

import math
from collections.abc import Callable
from typing import NamedTuple

from kvpilot.agent.control_signals import slo_of
from kvpilot.agent.guard import Reason, Refusal, SloLimits
from kvpilot.engine.stats import StatsWindow
from kvpilot.env.observation import Observation, observe
from kvpilot.exporter.source import NoHistoryError, Source, SourceError


class Seen(NamedTuple):
    """`window` and `observation` are None together; then `problems` says why."""

    window: StatsWindow | None
    observation: Observation | None
    problems: list[Refusal]
    age_seconds: float = 0.0


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
            return Seen(None, None, [Refusal(Reason.WARMUP, None, str(error))])
        except SourceError as error:
            self.failures += 1
            return Seen(None, None, [Refusal(Reason.SOURCE, None, str(error))])
        self.failures = 0
        if window.is_reset():
            self.windows_seen, self._offset = 0, math.inf
            detail = "a counter went down: the engine restarted"
            return Seen(None, None, [Refusal(Reason.RESET, None, detail)])
        now = self._clock()
        self._offset = min(self._offset, now - window.end.time)
        self.windows_seen += 1
        return Seen(window, observe(window, slo_of(slo)), [], now - self._offset - window.end.time)
