"""A table, for terminal and page alike."""

from typing import NamedTuple

from rich.console import Console
from rich.table import Table

PIPED_WIDTH = 160  # where there is no terminal that has one


class Sheet(NamedTuple):
    """Cells are ready to be shown; the first column names the rows."""

    title: str
    header: list[str]
    rows: list[list[str]]
    note: str


def show_sheet(sheet: Sheet, console: Console) -> None:
    table = Table(*sheet.header, title=sheet.title)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in sheet.rows:
        table.add_row(*row)
    console.print(table)
    console.print(f"[dim]{sheet.note}[/]")


def make_console() -> Console:
    """The terminal, or a file or pipe wide enough for a table."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPED_WIDTH)
