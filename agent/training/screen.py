"""What whoever waits for a training sees: one bar per stage, with rewards beside it."""

from contextlib import AbstractContextManager

from rich.console import Console

from kvpilot.agent.progress import Advance, progress_bar


class Screen:
    """Bars on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False)

    def stage(self, label: str, total: float) -> AbstractContextManager[Advance]:
        """Gives a function that takes how much is done, and a note."""
        return progress_bar(label, total, self.console, has_notes=True)
