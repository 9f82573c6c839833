"""The options of `tune`, `train` and `evaluate` that say which traffic they are about."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

if TYPE_CHECKING:
    from kvpilot.agent.jobs.workloads import Traffic

TRAFFIC = "Traffic"

Traces = Annotated[
    Path | None,
    Option(
        envvar="KVPILOT_TRACES",
        help="Folder of the traces of the standard workloads.",
        rich_help_panel=TRAFFIC,
    ),
]
WorkloadFiles = Annotated[
    list[Path] | None,
    Option("--workload", help="A workload as TOML or JSON; may be repeated.", rich_help_panel=TRAFFIC),
]
OneTrace = Annotated[
    Path | None, Option(help="A trace: its sessions, at the recorded rate.", rich_help_panel=TRAFFIC)
]
TraceUsers = Annotated[
    int | None, Option(min=1, help="Replay --trace in closed loop: so many users.", rich_help_panel=TRAFFIC)
]
Only = Annotated[
    list[str] | None, Option(help="Of the workloads only this one; may be repeated.", rich_help_panel=TRAFFIC)
]
SloLimit = Annotated[
    float | None,
    Option(
        help="In place of the workload's own; the same for tune, train and evaluate.", rich_help_panel=TRAFFIC
    ),
]
Jobs = Annotated[int, Option("--workers", min=1, help="Simulations at once, a process each.")]


def chosen_traffic(
    *,
    traces: Path | None,
    workload: Sequence[Path] | None,
    trace: Path | None,
    users: int | None,
    only: Sequence[str] | None,
    slo_ttft: float | None,
    slo_itl: float | None,
    quick: bool = False,
) -> "Traffic":
    """With `quick`, where nothing is chosen, few of the standard workloads. Raises ConfigError."""
    from kvpilot.agent.jobs.workloads import Traffic
    from kvpilot.agent.tune.config import QUICK_WORKLOADS

    chosen = tuple(only or ())
    if quick and not (chosen or workload or trace):
        chosen = QUICK_WORKLOADS
    return Traffic(
        traces=traces,
        files=tuple(workload or ()),
        trace=trace,
        users=users,
        only=chosen,
        slo_ttft_seconds=slo_ttft,
        slo_inter_token_seconds=slo_itl,
    )
