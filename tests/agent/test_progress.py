"""Where there is no terminal, long work says now and then how far it is."""

import io

from rich.console import Console

from kvpilot.agent import progress
from kvpilot.agent.progress import progress_bar


def lines_of(monkeypatch, line_seconds: float) -> list[str]:
    monkeypatch.setattr(progress, "LINE_SECONDS", line_seconds)
    file = io.StringIO()
    with progress_bar("trials", 4, Console(file=file, width=20)) as advance:
        for done in (1, 2, 3, 4, 4):
            advance(done)
    return file.getvalue().splitlines()


def test_every_step_is_a_line_where_each_takes_long(monkeypatch):
    lines = lines_of(monkeypatch, 0.0)
    assert [line.split(" after")[0] for line in lines] == [f"trials: {done} of 4" for done in (1, 2, 3, 4)]


def test_only_the_end_is_a_line_where_all_is_quick(monkeypatch):
    [line] = lines_of(monkeypatch, 3600.0)
    assert line.startswith("trials: 4 of 4 after 0:00:0")
