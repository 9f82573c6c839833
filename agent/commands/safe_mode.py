"""`autotune safe-mode`."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from kvpilot.engine.errors import ConfigError


def register(app: typer.Typer) -> None:
    app.command()(safe_mode)


def safe_mode(
    state: Annotated[Path, Option(help="The state file of `autotune run`.")] = Path("autotune-state.json"),
    leave: Annotated[
        bool, Option("--leave", help="Release the latch and forget the reverts; a running loop sees it.")
    ] = False,
) -> None:
    """Say whether safe mode is latched, and why; --leave lets the loop act again.

    autotune safe-mode --state autotune-state.json --leave
    """
    from kvpilot.agent.control.state import SafeState, StateFile

    if not state.exists():  # a loop writes it when it starts
        raise ConfigError(f"state={str(state)!r} does not exist: expected the state file of `autotune run`")
    file = StateFile(state)
    if leave:
        file.write(SafeState(trial=file.read().trial))
    saved = file.read()
    typer.echo(f"latched: {saved.safe_mode}" if saved.safe_mode else "not latched")
    typer.echo(f"{len(saved.reverts)} reverts remembered")
