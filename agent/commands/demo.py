"""`autotune demo`."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option


def register(app: typer.Typer) -> None:
    app.command()(demo)


def demo(
    model: Annotated[str, Option(help="As for `autotune serve`.")] = "smollm2",
    out: Annotated[Path, Option(help="Folder for report.html, run.json, audit and logs.")] = Path(
        "runs/demo"
    ),
    seconds_per_phase: Annotated[float, Option(help="There are five phases, twice.")] = 15.0,
    quick: Annotated[
        bool, Option("--quick", help="The same in about a minute, too short to judge by.")
    ] = False,
    pool_mb: Annotated[int, Option(help="KV pool in MiB: small, so that memory decides.")] = 48,
    seed: Annotated[int, Option(help="Of the traffic.")] = 1,
) -> None:
    """Show the loop on a real model: the same chats with static knobs, then tuned, and a report of both.

    Takes about 4 minutes on two cores. Ctrl-C leaves a report of what was measured until then.

        autotune demo

        autotune demo --quick --out /tmp/demo
    """
    from kvpilot.agent.demo.command import DemoConfig, run_demo

    seconds = 4.0 if quick else seconds_per_phase
    config = DemoConfig(model=model, out=out, seconds_per_phase=seconds, pool_mb=pool_mb, seed=seed)
    raise typer.Exit(run_demo(config))
