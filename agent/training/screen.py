"""What whoever waits for a training sees: one bar per stage, with rewards beside it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvpilot.agent.progress import progress_lines

Advance = Callable[[float, str], None]  # done so far, note


class Screen:
    """Bars on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False)

    @contextmanager
    def stage(self, label: str, total: float) -> Iterator[Advance]:
        """Yields a function that takes how much is done, and a note."""
        if not self.console.is_terminal:
            with progress_lines(label, total, self.console) as advance:
                yield advance
            return
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=12), MofNCompleteColumn())
        rest = (TimeElapsedColumn(), TextColumn("{task.fields[note]}"))
        with Progress(*columns, *rest, console=self.console) as progress:
            task = progress.add_task(label, total=total, note="")
            yield lambda done, note: progress.update(task, completed=done, note=note)
