"""The progress bars of commands that take a while; lines now and then where there is no terminal."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

LINE_SECONDS = 30.0  # from one line to the next
NOTED_BAR_WIDTH = 12


Step = Callable[[str, int, int], None]  # name, how much of it is done, and of how much (0: unknown)


class Advance(Protocol):
    """Takes how much is done of the total, and what else there is to say."""

    def __call__(self, done: float, note: str = "", /) -> None: ...


@contextmanager
def progress_bar(label: str, total: float, console: Console, *, has_notes: bool = False) -> Iterator[Advance]:
    """`has_notes` makes room for them, at the cost of the time that remains."""
    if not console.is_terminal:
        yield _lines(label, total, console)
        return
    shown = (TextColumn("{task.description}"), BarColumn(NOTED_BAR_WIDTH if has_notes else 40))
    last = TextColumn("{task.fields[note]}") if has_notes else TimeRemainingColumn()
    with Progress(*shown, MofNCompleteColumn(), TimeElapsedColumn(), last, console=console) as progress:
        task = progress.add_task(label, total=total, note="")
        yield lambda done, note="": progress.update(task, completed=done, note=note)


def _lines(label: str, total: float, console: Console) -> Advance:
    started = said = time.monotonic()
    is_done = False

    def advance(done: float, note: str = "", /) -> None:
        nonlocal said, is_done
        now = time.monotonic()
        if is_done or (now - said < LINE_SECONDS and done < total):
            return
        said, is_done = now, done >= total
        passed = timedelta(seconds=round(now - started))
        console.print(
            f"{label}: {done:g} of {total:g} after {passed} {note}".rstrip(), highlight=False, soft_wrap=True
        )

    return advance


@contextmanager
def step_bar(console: Console) -> Iterator[Step]:
    """For steps of a few seconds, one after the other. Gone at the end; nothing where there is no terminal."""
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        yield lambda name, done, total: progress.update(
            task, description=name, completed=done, total=total or None
        )
