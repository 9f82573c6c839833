"""`autotune replay`: a trace in the simulator or against a server, written and shown; or results side by side."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvpilot.agent.interrupt import interruptible
from kvpilot.agent.progress import progress_bar
from kvpilot.agent.provenance import run_facts
from kvpilot.agent.simulate.setup import Envelope, Requests
from kvpilot.engine.errors import ConfigError
from kvpilot.env.replay.compare import check_out, describe, names_of, page_of, warnings_of
from kvpilot.env.replay.limits import check_losses, window_of
from kvpilot.env.replay.report import change_title, figure_rows, unanswered, write_report
from kvpilot.env.replay.result import ReplayResult, Slo, read_result
from kvpilot.env.replay.sim import SimReplay, replay_simulated
from kvpilot.env.simulator.latency import load_profile
from kvpilot.env.traces.trace import Trace

Named = Sequence[tuple[str, ReplayResult]]
STYLES = {"good": "green", "bad": "red", "even": "dim"}


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    requests: Requests
    out: Path  # the result as JSON; the page lies beside it
    slo: Slo
    on: str = "sim"  # or the URL of a server
    window_seconds: float | None = None  # per point of the time series; None: a 120th of the trace
    end_seconds: float = inf
    # in the simulator
    profile: str
    envelope: Envelope
    users: int | None = None  # closed loop
    # against a server
    model: str
    prompts: str
    vocab_size: int
    drain_seconds: float  # for the last answers


def run_replay(config: ReplayConfig) -> int:
    """Returns the exit code: 130 if it was interrupted; what there is is written all the same."""
    check_out(config.out, ".json")
    trace = config.requests.read()
    seconds = min(trace.duration_seconds, config.end_seconds)
    window_seconds = window_of(config.window_seconds, seconds, name="window_seconds")
    replay = (_in_simulator if config.on == "sim" else _against_server)(config, trace, window_seconds)
    console = Console()
    with interruptible() as is_stopped, progress_bar("replaying", len(trace), console) as advance:
        result = replay(progress=lambda done, total: advance(done), is_stopped=is_stopped)
        interrupted = is_stopped()
    _write(_with_provenance(result, config.requests.file), config.out, console)
    return 130 if interrupted else 0


def run_compare(files: Sequence[Path], out: Path) -> int:
    """Results side by side; the exit code. Raises ReplayFormError and ConfigError."""
    if len(files) < 2:
        raise ConfigError(f"--compare with {len(files)} result is invalid: expected two or more")
    page = page_of(out, files)
    results = [(name, read_result(file)) for name, file in zip(names_of(files), files, strict=True)]
    write_report(results, page)
    console = Console()
    _show(results, console)
    for warning in warnings_of(results):
        console.print(f"[yellow]{escape(warning)}[/]")
    print(page)
    return 0


def _in_simulator(config: ReplayConfig, trace: Trace, window_seconds: float) -> Callable[..., ReplayResult]:
    profile = load_profile(config.profile)
    engine = config.envelope.engine(profile, trace)
    replay = SimReplay(
        profile=profile,
        engine=engine,
        slo=config.slo,
        window_seconds=window_seconds,
        users=config.users,
        end_seconds=config.end_seconds,
        seed=config.requests.seed,
    )
    check_losses(replay.quality_loss, engine.ladder, config.envelope.kv_level, source=profile.name)
    return partial(replay_simulated, trace, replay)


def _against_server(config: ReplayConfig, trace: Trace, window_seconds: float) -> Callable[..., ReplayResult]:
    from kvpilot.env.replay.http import HttpReplay, replay_http  # which needs an HTTP client

    if config.users is not None:
        raise ConfigError("users is for --on sim: against a server the arrivals are as recorded")
    replay = HttpReplay(
        url=config.on.rstrip("/"),
        model=config.model,
        slo=config.slo,
        prompts=config.prompts,
        vocab_size=config.vocab_size,
        window_seconds=window_seconds,
        end_seconds=config.end_seconds,
        drain_seconds=config.drain_seconds,
        seed=config.requests.seed,
    )
    return partial(replay_http, trace, replay)


def _with_provenance(result: ReplayResult, file: Path) -> ReplayResult:
    return replace(
        result, trace={"name": file.name, **result.trace}, provenance={**result.provenance, **run_facts()}
    )


def _write(result: ReplayResult, out: Path, console: Console) -> None:
    result.write(out)
    page = out.with_suffix(".html")
    write_report([(out.stem, result)], page)
    _show([(out.stem, result)], console)
    if result.is_partial:
        console.print("[yellow]stopped before the end of the trace: these are the figures until then[/]")
    console.print(escape(f"{out} and {page}"))


def _show(results: Named, console: Console) -> None:
    several = len(results) > 1
    console.print(_table(results))
    for name, result in results:
        if several:
            console.print(f"{escape(name)}: {escape(describe(result))}")
        answered = result.summary["status"].get("done", 0)
        whose = f"{escape(name)}: " if several else ""
        for line in unanswered(result):
            console.print(f"[yellow]{whose}{escape(line)}[/]")
        if answered:
            console.print(f"{whose}percentiles are over the {answered:,} answered requests")
        else:
            console.print(f"[red]{whose}no request was answered: there are no latencies to show[/]")


def _table(results: Named) -> Table:
    several = len(results) > 1
    titles = [escape(name) for name, _ in results] + ([change_title(len(results))] if several else [])
    table = Table("", *titles)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in figure_rows([result for _, result in results]):
        change = [f"[{STYLES[row.verdict]}]{row.change}[/]"] if several else []
        table.add_row(row.label, *row.values, *change)
    return table
