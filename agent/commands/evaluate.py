"""`autotune evaluate`."""

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

ORACLE = "Oracle"
QUICK_SECONDS = 1200.0


def register(app: typer.Typer) -> None:
    app.command()(evaluate)


# Long: a parameter per flag.
def evaluate(
    tuned: Annotated[Path, Option(help="What `autotune tune` found on the same workloads.")],
    policy: Annotated[
        list[str] | None,
        Option(
            help="[LABEL=]SPEC, may be repeated: the folder of a trained policy, ppo (the one that is shipped) or "
            "another name, static:FILE, hysteresis:FILE. Those with one label are seeds of one policy."
        ),
    ] = None,
    traces: Traces = None,
    workload: WorkloadFiles = None,
    trace: OneTrace = None,
    users: TraceUsers = None,
    only: Only = None,
    slo_ttft: SloLimit = None,
    slo_itl: SloLimit = None,
    split: Annotated[str, Option(help="Sessions to draw from: test, validation or train.")] = "test",
    episodes: Annotated[int, Option(min=1, help="Drawn per workload.")] = 6,
    seed: Annotated[int, Option(min=0, help="Of the first episode of each.")] = 1000,
    out: Annotated[
        Path, Option("--out", "-o", help="Figures as JSON; the page lies beside it as .html.")
    ] = Path("evaluation.json"),
    cache: Annotated[Path | None, Option(help="Folder of kept runs. [default: --out with .runs]")] = None,
    peers: Annotated[bool, Option(help="Run threshold, hill-climb, bandit and random, too.")] = True,
    oracle: Annotated[
        bool, Option(help="Run the oracle, which takes longest.", rich_help_panel=ORACLE)
    ] = True,
    oracle_seconds: Annotated[float, Option(help="How far it looks ahead.", rich_help_panel=ORACLE)] = 900.0,
    oracle_every: Annotated[float, Option(help="How often it looks.", rich_help_panel=ORACLE)] = 300.0,
    quick: Annotated[bool, Option("--quick", help="One short episode of few workloads.")] = False,
    workers: Jobs = 2,
) -> None:
    """Compare policies on traffic that none of them has seen, with the same episodes and seeds for all.

    Runs are kept: an interrupted evaluation goes on, and a further policy costs its own runs only.

        autotune evaluate --traces ./traces --tuned tuned.json --policy ./policy

        autotune evaluate --traces ./traces --tuned tuned.json --policy ppo=runs/0 --policy ppo=runs/1
    """
    from kvpilot.agent.evaluation.command import run_evaluate
    from kvpilot.agent.evaluation.config import EvaluateConfig, choose_policies
    from kvpilot.agent.evaluation.runs import workload_hash
    from kvpilot.agent.policies.spec import parse_spec
    from kvpilot.agent.tune.result import read_tuned
    from kvpilot.env.replay.compare import check_out

    check_out(out, ".json")
    found = read_tuned(tuned)
    given = tuple(parse_spec(text) for text in policy or ())
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
    workloads = traffic.workloads(split)
    found.check_workloads({name: workload_hash(one) for name, one in workloads.items()}, str(tuned))
    looks = (QUICK_SECONDS / 2, QUICK_SECONDS / 2) if quick else (oracle_seconds, oracle_every)
    config = EvaluateConfig(
        workloads=workloads,
        label=traffic.label,
        policies=choose_policies(found, given, with_peers=peers, oracle=looks if oracle else None),
        tuned=tuned,
        out=out,
        cache=cache or out.with_suffix(".runs"),
        split=split,
        episodes=1 if quick else episodes,
        seed=seed,
        seconds=QUICK_SECONDS if quick else None,
        workers=workers,
    )
    raise typer.Exit(run_evaluate(config))
