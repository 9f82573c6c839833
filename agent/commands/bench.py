"""`autotune bench`: measure the engine on this machine."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

app = typer.Typer(no_args_is_help=True, help="Measure the engine on this machine.")


@app.callback()
def _group() -> None:
    """Keeps `quality` a subcommand while it is the only one."""


@app.command()
def quality(
    model: Annotated[str, Option(help="As for `autotune serve`; computed in float32.")] = "smollm2",
    windows: Annotated[int, Option(min=1, max=16, help="Of 2,048 tokens, prose and code in turn.")] = 16,
    quick: Annotated[
        bool, Option("--quick", help="2 windows and no ablations: an impression, not a result.")
    ] = False,
    threads: Annotated[int | None, Option(min=1, help="CPU threads. [default: all cores]")] = None,
    json_path: Annotated[Path | None, Option("--json", help="Write the result here too.")] = None,
    table_path: Annotated[
        Path | None,
        Option("--table", help="Merge mean KL per codec into this file, as engine/kv/quality.json."),
    ] = None,
) -> None:
    """Measure what each precision of the KV cache costs: KL, perplexity and top-1 agreement.

    Shipped prose and code, every sealed page at the precision under test, against an exact cache.
    About 10 minutes on two cores.

        autotune bench quality

        autotune bench quality --quick --json quality.json
    """
    from kvpilot.agent.bench.command import QualityConfig, run_quality

    config = QualityConfig(
        model=model,
        num_windows=windows,
        quick=quick,
        threads=threads,
        json_path=json_path,
        table_path=table_path,
    )
    raise typer.Exit(run_quality(config))
