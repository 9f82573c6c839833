"""The progress bar of commands that take a while; lines now and then where there is no terminal."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

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


@contextmanager
def progress_lines(label: str, total: float, console: Console) -> Iterator[Callable[[float, str], None]]:
    """Yields a function that takes how much is done of `total`, and a note."""
    started = said = time.monotonic()
    is_done = False

    def advance(done: float, note: str = "") -> None:
        nonlocal said, is_done
        now = time.monotonic()
        if is_done or (now - said < LINE_SECONDS and done < total):
            return
        said, is_done = now, done >= total
        passed = timedelta(seconds=round(now - started))
        console.print(
            f"{label}: {done:g} of {total:g} after {passed} {note}".rstrip(), highlight=False, soft_wrap=True
        )

    yield advance


@contextmanager
def progress_bar(label: str, total: float, console: Console) -> Iterator[Callable[[float], None]]:
    """Yields a function that takes how much is done of `total`."""
    if not console.is_terminal:
        with progress_lines(label, total, console) as advance:
            yield lambda done: advance(done, "")
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(label, total=total)
        yield lambda done: progress.update(task, completed=done)
