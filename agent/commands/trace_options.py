"""Options that the commands of `autotune trace` share, and checks of values that typer's bounds cannot hold."""

import math
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer
from typer import Option


def above_zero(high: float = math.inf) -> Callable[[float | None], float | None]:
    """A check of an option: a finite number in (0, high]."""

    def check(value: float | None) -> float | None:
        if value is not None and not (0 < value <= high and math.isfinite(value)):
            bounds = f"in (0, {high:g}]" if math.isfinite(high) else "> 0"
            raise typer.BadParameter(f"{value:g}: expected a number {bounds}")
        return value

    return check


Format = Annotated[
    str,
    Option("--format", help="auto, mooncake, agentic, azure, jsonl or parquet.", rich_help_panel="Reading"),
]
SkipBad = Annotated[
    bool, Option("--skip-bad", help="Drop bad records, count them and say so.", rich_help_panel="Reading")
]
SessionRate = Annotated[
    float,
    Option(
        "--session-rate",
        callback=above_zero(),
        help="Agentic archives: session starts per second.",
        rich_help_panel="Reading",
    ),
]
BlockSize = Annotated[
    int | None, Option("--block-size", min=1, help="Tokens per block: a divisor or multiple of the file's.")
]
Seed = Annotated[int, Option("--seed", min=0, help="Of all that is drawn.")]


def parse_window(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        start, stop = (float(part) for part in text.split(":"))
    except ValueError:
        raise typer.BadParameter(f"{text!r}: expected START:STOP in seconds", param_hint="--window") from None
    return start, stop


def parse_sizes(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise typer.BadParameter(f"{text!r}: expected numbers of blocks, as 2000,5000", param_hint="--sizes")
    return sizes


def check_page(path: Path, inputs: Sequence[Path]) -> None:
    from kvpilot.env.traces.files import check_target

    if not path.parent.is_dir():
        raise typer.BadParameter(f"{path}: there is no folder {path.parent}", param_hint="--html")
    check_target(path, inputs)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"{path}: may not be written", param_hint="--html")


def check_switches(combine: str, switch_at: Sequence[float], num_files: int) -> None:
    if (combine == "switch") != bool(switch_at):
        raise typer.BadParameter("--combine switch and --switch-at go together")
    rising = all(a < b < math.inf for a, b in pairwise([0.0, *switch_at]))
    if switch_at and (len(switch_at) != num_files - 1 or not rising):
        raise typer.BadParameter(
            f"{', '.join(f'{at:g}' for at in switch_at)}: expected one less than files, rising, each > 0",
            param_hint="--switch-at",
        )
