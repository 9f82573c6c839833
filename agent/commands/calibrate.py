"""`autotune calibrate`."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option


def register(app: typer.Typer) -> None:
    app.command()(calibrate)


# Long: a parameter per flag.
def calibrate(
    out: Annotated[
        Path, Option("--out", "-o", help="The profile; the measured steps lie beside it as .jsonl.")
    ],
    model: Annotated[str, Option(help="As for `autotune serve`.")] = "smollm2",
    name: Annotated[str | None, Option(help="Of the profile. [default: the file's]")] = None,
    threads: Annotated[int | None, Option(min=1, help="CPU threads. [default: all cores]")] = None,
    page_size: Annotated[int, Option(help="Tokens per page.")] = 32,
    prefill_chunk: Annotated[
        int | None, Option(min=1, help="Prompt tokens per step. [default: 256; 2048 on a GPU]")
    ] = None,
    device: Annotated[str, Option(help="cpu, or cuda: an NVIDIA GPU, with triton installed.")] = "cpu",
    load_format: Annotated[str, Option(help="auto, or dummy: random weights in the model's shape.")] = "auto",
    quick: Annotated[bool, Option("--quick", help="A small grid: to try it out, not to rely on.")] = False,
    note: Annotated[str, Option(help="Goes into the profile: anything a reader should know.")] = "",
    fit_only: Annotated[
        Path | None, Option(help="Fit the steps of an earlier run, and measure nothing.")
    ] = None,
    seed: Annotated[int, Option(help="Of prompts and order.")] = 0,
) -> None:
    """Measure what steps of this engine on this machine cost, and fit a latency profile for the simulator.

    Takes a few minutes, and a machine that does nothing else. Ctrl-C keeps the measured steps.

        autotune calibrate --out my-machine.json

        autotune calibrate --device cuda --model ./Llama-3.1-8B --page-size 64 --out my-gpu.json

        autotune replay trace.jsonl --profile ./my-machine.json
    """
    from kvpilot.agent.simulate.calibrate import CalibrateConfig, run_calibration
    from kvpilot.env.replay.compare import check_out

    check_out(out, ".json")
    config = CalibrateConfig(
        out=out,
        model=model,
        name=name or out.stem,
        threads=threads,
        page_size=page_size,
        prefill_chunk=prefill_chunk,
        device=device,
        load_format=load_format,
        quick=quick,
        note=note,
        fit_only=fit_only,
        seed=seed,
    )
    raise typer.Exit(run_calibration(config))
