"""`autotune train`."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from kvpilot.agent.commands.traffic_options import (
    OneTrace,
    Only,
    SloLimit,
    Traces,
    TraceUsers,
    WorkloadFiles,
    chosen_traffic,
)


def register(app: typer.Typer) -> None:
    app.command()(train)


# Long: a parameter per flag.
def train(
    traces: Traces = None,
    workload: WorkloadFiles = None,
    trace: OneTrace = None,
    users: TraceUsers = None,
    only: Only = None,
    slo_ttft: SloLimit = None,
    slo_itl: SloLimit = None,
    tuned: Annotated[Path, Option(help="What `autotune tune` found on the same traffic.")] = Path(
        "tuned.json"
    ),
    out: Annotated[
        Path, Option("--out", "-o", help="Folder of all that is made; the policy is in its folder `policy`.")
    ] = Path("trained"),
    config: Annotated[
        Path | None, Option(help="TOML with any of the settings that a training saves as config.toml.")
    ] = None,
    seeds: Annotated[
        int | None, Option(min=1, help="Networks trained, then joined to one. [default: 5]")
    ] = None,
    workers: Annotated[int | None, Option(min=1, help="Processes that simulate. [default: 2]")] = None,
    quick: Annotated[
        bool, Option("--quick", help="All stages in about 3 minutes: to try it out, not to rely on.")
    ] = False,
    resume: Annotated[bool, Option("--resume", help="Go on with the training in --out.")] = False,
    search: Annotated[
        int | None,
        Option(
            min=1,
            metavar="N",
            help="Search the settings of training itself: so many trials of one seed each.",
        ),
    ] = None,
) -> None:
    """Train a policy: clone what pays in the simulator, then PPO in small steps, then join the seeds to one.

    Starts from the portfolio and the rule that `autotune tune` found. About an hour on two cores; Ctrl-C keeps the
    best so far, and --resume goes on. Curves: `tensorboard --logdir trained/tensorboard`.

        autotune tune --traces ./traces

        autotune train --traces ./traces --tuned tuned.json --out trained

        autotune evaluate --traces ./traces --tuned tuned.json --policy trained/policy
    """
    from kvpilot.agent.provenance import command_line
    from kvpilot.agent.training import config as configs
    from kvpilot.agent.training.command import run_search, run_train
    from kvpilot.agent.training.request import TrainRequest
    from kvpilot.agent.training.training import resumed_config
    from kvpilot.engine.errors import ConfigError

    if resume and (config or quick or seeds or workers or search):
        raise ConfigError("--resume goes on with the settings in --out: expected no other settings beside it")
    if resume:
        settings = resumed_config(out)
    else:
        settings = configs.quick(one_workload=not (workload or trace)) if quick else configs.TrainConfig()
        settings = configs.read_config(config, settings) if config else settings
        asked = {"seeds": seeds, "workers": workers, "workloads": tuple(only or ()) or None}
        settings = settings.with_(**{name: value for name, value in asked.items() if value is not None})
    traffic = chosen_traffic(
        traces=traces,
        workload=workload,
        trace=trace,
        users=users,
        only=settings.workloads,
        slo_ttft=slo_ttft,
        slo_itl=slo_itl,
    )
    request = TrainRequest(
        config=settings,
        tuned_path=tuned,
        workloads=traffic.workloads("train"),
        out=out,
        command=command_line(),
    )
    raise typer.Exit(run_search(request, search) if search else run_train(request, resume=resume))
