"""ScrapeSource: which two scrapes a window lies between."""

import pytest

from kvpilot.engine.errors import ConfigError
from kvpilot.engine.stats import StatsRecorder, StatsSnapshot
from kvpilot.exporter.scrape import ScrapeError
from kvpilot.exporter.source import NoHistoryError, ScrapeSource, SourceError


class Engine:
    def __init__(self) -> None:
        self.time, self.recorder, self.broken = 100.0, StatsRecorder(), False

    def snapshot(self) -> StatsSnapshot:
        if self.broken:
            raise ScrapeError("kvpilot_steps: missing")
        return self.recorder.snapshot(self.time, {})

    def work(self, seconds: float, steps: int = 1) -> None:
        self.time += seconds
        self.recorder.add("steps", steps)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def source(engine: Engine) -> ScrapeSource:
    return ScrapeSource(engine.snapshot)


def test_the_first_scrapes_give_no_window(engine, source):
    for _ in range(3):
        with pytest.raises(NoHistoryError, match="60 s needs one"):
            source.window(60)
        engine.work(10)
    assert source.window(60).seconds == 30


def test_the_start_is_the_scrape_nearest_to_the_length_asked_for(engine, source):
    for _ in range(2):
        with pytest.raises(NoHistoryError):
            source.window(25)
        engine.work(10.2)
    windows = []
    for _ in range(10):
        windows.append(source.window(25))
        engine.work(10.2)
    window = windows[-1]
    assert window.seconds == pytest.approx(20.4)
    assert window.total("steps") == 2


def test_a_restart_is_told_once_and_then_forgotten(engine, source):
    for _ in range(4):
        engine.work(10)
        with pytest.raises(NoHistoryError):
            source.window(100)
    engine.recorder = StatsRecorder()
    engine.work(10)
    assert source.window(20).is_reset()
    with pytest.raises(NoHistoryError):
        source.window(20)
    engine.work(20)
    window = source.window(20)
    assert not window.is_reset()
    assert window.total("steps") == 1


def test_old_scrapes_are_dropped(engine, source):
    with pytest.raises(NoHistoryError):
        source.window(10)
    for _ in range(50):
        engine.work(10)
        source.window(10)
    assert len(source._snapshots) == 3


def test_what_the_scrape_raises_is_a_source_error(engine, source):
    engine.broken = True
    with pytest.raises(SourceError, match="kvpilot_steps: missing") as caught:
        source.window(10)
    assert not isinstance(caught.value, NoHistoryError)


@pytest.mark.parametrize("seconds", [0, -1, 86_401, float("nan")])
def test_lengths_out_of_bounds(source, seconds):
    with pytest.raises(ConfigError, match="seconds="):
        source.window(seconds)
