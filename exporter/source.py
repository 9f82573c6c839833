"""Where a control loop gets its windows from: one interface over direct scrapes and a Prometheus server."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from kvpilot.engine.errors import ConfigError, KVPilotError
from kvpilot.engine.stats import StatsSnapshot, StatsWindow

MAX_WINDOW_SECONDS = 86_400.0
T = TypeVar("T")


class SourceError(KVPilotError):
    """No window can be had: nobody answers, a metric is missing, or the samples are too old. Hold."""


class NoHistoryError(SourceError):
    """Too little has been seen for a window of this length: nothing is wrong, ask again later."""


class Source(Protocol):
    """Windows of one engine. The same traffic gives the same window whichever source it comes from."""

    def window(self, seconds: float) -> StatsWindow:
        """About the last `seconds`, both ends at samples that were really taken.

        `window.seconds` is the true length, at least half of what was asked for. A restart of the engine
        is never hidden: `window.is_reset()` is true. Raises NoHistoryError (ask again later) and SourceError
        (hold); never waits longer than the source's timeout.
        """
        ...

    def close(self) -> None: ...


class ScrapeSource:
    """Windows between scrapes that it makes itself: one per call, so call it at least every `seconds`.

    `scrape` gives the engine's statistics now (`Scraper.snapshot`); what it raises is raised as SourceError
    if it is a KVPilotError. Snapshots are kept for twice the longest window asked for, on the engine's clock.
    """

    def __init__(self, scrape: Callable[[], StatsSnapshot]) -> None:
        self._scrape = scrape
        self._snapshots: deque[StatsSnapshot] = deque()
        self._longest_seconds = 0.0

    def window(self, seconds: float) -> StatsWindow:
        check_window_seconds(seconds)
        self._longest_seconds = max(self._longest_seconds, seconds)
        end = self._newest()
        previous = self._snapshots[-1] if self._snapshots else None
        if previous is not None and StatsWindow(start=previous, end=end).is_reset():
            self._snapshots = deque([end])
            return StatsWindow(start=previous, end=end)
        start = nearest(self._snapshots, end.time, seconds, lambda snapshot: snapshot.time)
        if (
            not self._snapshots or end.time > self._snapshots[-1].time
        ):  # metrics that stand still fill no memory
            self._snapshots.append(end)
        while end.time - self._snapshots[0].time > 2 * self._longest_seconds:
            self._snapshots.popleft()
        if start is None:
            raise NoHistoryError(
                f"no scrape is {seconds / 2:g} s old yet: a window of {seconds:g} s needs one"
            )
        return StatsWindow(start=start, end=end)

    def close(self) -> None:
        """Nothing: whoever made `scrape` closes what it reads from."""

    def _newest(self) -> StatsSnapshot:
        try:
            return self._scrape()
        except SourceError:
            raise
        except KVPilotError as error:
            raise SourceError(str(error)) from error


def check_window_seconds(seconds: float) -> None:
    if not 0 < seconds <= MAX_WINDOW_SECONDS:
        bounds = f"expected a number in (0, {MAX_WINDOW_SECONDS:g}]"
        raise ConfigError(f"seconds={seconds!r} is invalid: {bounds}")


def nearest(samples: Iterable[T], end: float, seconds: float, time: Callable[[T], float]) -> T | None:
    """The one whose age at `end` is nearest to `seconds`; None if all are younger than half of that."""
    old = [sample for sample in samples if end - time(sample) >= seconds / 2]
    return min(old, key=lambda sample: abs(end - time(sample) - seconds), default=None)
