"""`autotune tune`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from kvpilot.agent.commands.traffic_options import (
    Jobs,
    OneTrace,
    Only,
    SloLimit,
    Traces,
    TraceUsers,
    WorkloadFiles,
    chosen_traffic,
)

EFFORT, SEARCH = "Effort", "Search"


def register(app: typer.Typer) -> None:
    app.command()(tune)


# Long: a parameter per flag.
def tune(
    traces: Traces = None,
    workload: WorkloadFiles = None,
    trace: OneTrace = None,
    users: TraceUsers = None,
    only: Only = None,
    slo_ttft: SloLimit = None,
    slo_itl: SloLimit = None,
    out: Annotated[
        Path, Option("--out", "-o", help="What was found; the page lies beside it as .html.")
    ] = Path("tuned.json"),
    storage: Annotated[
        str | None,
        Option(
            help="Of the trials: a database URL, a journal file (.journal), or a SQLite file. "
            "[default: --out with .db]",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    study: Annotated[str, Option(help="Its name in the storage.", rich_help_panel=SEARCH)] = "tune",
    cache: Annotated[
        Path | None,
        Option(help="Folder of kept simulations. [default: --out with .runs]", rich_help_panel=SEARCH),
    ] = None,
    trials: Annotated[
        int | None,
        Option(min=1, help="Settings tried on all workloads. [default: 40]", rich_help_panel=EFFORT),
    ] = None,
    regime_trials: Annotated[
        int | None, Option(min=0, help="And on each workload alone. [default: 8]", rich_help_panel=EFFORT)
    ] = None,
    rule_trials: Annotated[
        int | None, Option(min=0, help="Of the hysteresis rule. [default: 24]", rich_help_panel=EFFORT)
    ] = None,
    episodes: Annotated[
        int | None, Option(min=1, help="Drawn per workload. [default: 2]", rich_help_panel=EFFORT)
    ] = None,
    minutes: Annotated[
        float | None, Option(help="End the search after about so long.", rich_help_panel=EFFORT)
    ] = None,
    quick: Annotated[
        bool, Option("--quick", help="About a minute: to try it out, not to rely on.", rich_help_panel=EFFORT)
    ] = False,
    max_quality_loss: Annotated[
        float | None, Option(help="Limit: mean KL in nats per token.", rich_help_panel=SEARCH)
    ] = None,
    min_goodput: Annotated[
        float | None,
        Option(min=0, max=1, help="Limit: share of answers within the SLO.", rich_help_panel=SEARCH),
    ] = None,
    several_objectives: Annotated[
        bool,
        Option(
            "--pareto",
            help="Search the front of hit rate, latency and quality; of it the best by reward is taken.",
            rich_help_panel=SEARCH,
        ),
    ] = False,
    portfolio: Annotated[int, Option(min=1, help="Settings in it, at most.", rich_help_panel=SEARCH)] = 8,
    seed: Annotated[int, Option(min=0, help="Of episodes and search.", rich_help_panel=SEARCH)] = 0,
    workers: Jobs = 2,
) -> None:
    """Find good settings by replaying traffic in the simulator: one for all of it, one per regime, and a rule.

    Resumes where it was stopped (Ctrl-C writes what there is); several machines may share a database.

        autotune tune --traces ./traces

        autotune tune --trace conversation.jsonl --slo-ttft 5 --max-quality-loss 0.0005

        autotune evaluate --traces ./traces --tuned tuned.json
    """
    from kvpilot.agent.tune.command import run_tune
    from kvpilot.agent.tune.config import QUICK, Effort, TuneConfig
    from kvpilot.agent.tune.figures import Limits
    from kvpilot.env.replay.compare import check_out

    check_out(out, ".json")
    traffic = chosen_traffic(
        traces=traces,
        workload=workload,
        trace=trace,
        users=users,
        only=only,
        slo_ttft=slo_ttft,
        slo_itl=slo_itl,
        quick=quick,
    )
    asked = {
        "trials": trials,
        "regime_trials": regime_trials,
        "rule_trials": rule_trials,
        "episodes": episodes,
    }
    effort = replace(QUICK if quick else Effort(), **{n: v for n, v in asked.items() if v is not None})
    config = TuneConfig(
        workloads=traffic.workloads("train"),
        label=traffic.label,
        out=out,
        storage=storage or str(out.with_suffix(".db")),
        study=study,
        effort=effort,
        limits=Limits(max_quality_loss=max_quality_loss, min_goodput=min_goodput),
        several_objectives=several_objectives,
        portfolio=portfolio,
        workers=workers,
        seed=seed,
        minutes=minutes,
        cache=cache or out.with_suffix(".runs"),
    )
    raise typer.Exit(run_tune(config))
