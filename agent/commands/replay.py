"""`autotune calibrate`, `autotune replay`, `autotune sensitivity`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from kvpilot.engine.errors import ConfigError

if TYPE_CHECKING:
    from kvpilot.engine.config import EngineConfig
    from kvpilot.env.simulator.latency import LatencyProfile
    from kvpilot.env.traces.trace import Trace

MODELLING, TRAFFIC, SERVER = "Simulated engine", "Traffic", "Against a server"
DEFAULT_PROFILE = "h200-llama3-8b"

Sample = Annotated[float, Option(help="Share of the sessions to keep.", rich_help_panel=TRAFFIC)]
Seed = Annotated[int, Option(min=0, help="Of all that is drawn.", rich_help_panel=TRAFFIC)]
FileFormat = Annotated[
    str, Option("--format", help="auto, mooncake, agentic, azure, jsonl or parquet.", rich_help_panel=TRAFFIC)
]
SessionRate = Annotated[
    float, Option(help="Agentic archives: session starts per second.", rich_help_panel=TRAFFIC)
]
MaxTokens = Annotated[
    int | None,
    Option(min=1, help="Drop requests with more, prompt and reply together.", rich_help_panel=TRAFFIC),
]
Users = Annotated[
    int | None,
    Option(min=1, help="Closed loop: so many users take the sessions one by one.", rich_help_panel=TRAFFIC),
]
Seconds = Annotated[
    float | None, Option(help="Stop the clock here. [default: the end]", rich_help_panel=TRAFFIC)
]
Profile = Annotated[
    str, Option(help="Latency profile: shipped by name, or a .json file.", rich_help_panel=MODELLING)
]
PoolMb = Annotated[
    int | None, Option(min=1, help="KV pool in MiB. [default: the profile's]", rich_help_panel=MODELLING)
]
PageSize = Annotated[
    int | None,
    Option(min=2, help="Tokens per page. [default: the trace's blocks]", rich_help_panel=MODELLING),
]
Eviction = Annotated[str, Option(help="lru, hazard, or belady, the oracle.", rich_help_panel=MODELLING)]
Starvation = Annotated[
    float, Option(help="A request that waits longer goes first.", rich_help_panel=MODELLING)
]
Ttl = Annotated[float, Option(help="Knob ttl_seconds.", rich_help_panel=MODELLING)]
SizeFactor = Annotated[float, Option(help="Knob size_factor.", rich_help_panel=MODELLING)]
MaxBatch = Annotated[
    int | None, Option(min=1, help="Knob max_batch. [default: the profile's]", rich_help_panel=MODELLING)
]
KvLevel = Annotated[int, Option(min=0, help="Knob kv_level.", rich_help_panel=MODELLING)]
SloTtft = Annotated[float, Option(help="A good request has its first token within so many seconds.")]
SloItl = Annotated[float, Option(help="And so many seconds between two tokens, on the mean.")]


def register(app: typer.Typer) -> None:
    for command in (calibrate, replay, sensitivity):
        app.command()(command)


def replay(
    context: typer.Context,
    files: Annotated[
        list[Path],
        Argument(metavar="TRACE | --compare RESULT.json...", help="A trace; with --compare, results."),
    ],
    on: Annotated[str, Option(help="sim, or the URL of an OpenAI-compatible server.")] = "sim",
    out: Annotated[
        Path | None,
        Option(
            "--out",
            "-o",
            help="The result as JSON, the page beside it as .html; with --compare, the page. "
            "[default: replay.json; compared.html]",
        ),
    ] = None,
    compare: Annotated[bool, Option("--compare", help="Put results side by side.")] = False,
    slo_ttft: SloTtft = 5.0,
    slo_itl: SloItl = 0.1,
    window: Annotated[
        float | None, Option(help="Seconds per point of the time series. [default: a 120th of the trace]")
    ] = None,
    sample: Sample = 1.0,
    seed: Seed = 0,
    users: Users = None,
    seconds: Seconds = None,
    max_tokens: MaxTokens = None,
    file_format: FileFormat = "auto",
    session_rate: SessionRate = 1 / 60,
    profile: Profile = DEFAULT_PROFILE,
    pool_mb: PoolMb = None,
    page_size: PageSize = None,
    eviction: Eviction = "lru",
    starvation_seconds: Starvation = 300.0,
    ttl: Ttl = 0.0,
    size_factor: SizeFactor = 0.0,
    max_batch: MaxBatch = None,
    kv_level: KvLevel = 0,
    model: Annotated[str, Option(help="Model name to ask for.", rich_help_panel=SERVER)] = "smollm2",
    prompts: Annotated[
        str, Option(help="ids (token ids), words, or auto: what it takes.", rich_help_panel=SERVER)
    ] = "auto",
    vocab_size: Annotated[
        int, Option(min=2, help="Token ids are drawn below.", rich_help_panel=SERVER)
    ] = 30_000,
    drain: Annotated[
        float, Option(help="Seconds to wait for the last answers.", rich_help_panel=SERVER)
    ] = 60.0,
) -> None:
    """Replay recorded traffic, simulated in seconds or against a server in real time.

    Ctrl-C writes what there is.

        autotune replay conversation.jsonl --sample 0.125

        autotune replay conversation.jsonl --sample 0.125 --kv-level 2 --out int4.json

        autotune replay --compare replay.json int4.json --out compared.html

        autotune replay chats.parquet --on http://127.0.0.1:8000
    """
    from kvpilot.env.replay.limits import check_losses, check_number, window_of
    from kvpilot.env.replay.result import Slo

    if compare:
        _refuse_replay_options(context)
        _compare(files, out or Path("compared.html"))
        return
    out = out or Path("replay.json")
    if len(files) != 1:
        raise ConfigError(
            f"{len(files)} traces are invalid: expected one (`autotune trace compose` joins several)"
        )
    check_out(out, ".json")
    check_number(drain, name="--drain", low=0.0)
    _check_traffic(sample, session_rate, seconds)
    if window is not None:
        check_number(window, name="--window", above=0.0)
    slo = Slo(ttft_seconds=slo_ttft, inter_token_seconds=slo_itl)
    trace = _read(files[0], file_format, session_rate, sample, seed, max_tokens)
    end = seconds if seconds is not None else float("inf")
    window_seconds = window_of(window, min(trace.duration_seconds, end), name="--window")
    if on == "sim":
        from kvpilot.env.replay.sim import SimReplay, replay_simulated
        from kvpilot.env.simulator.latency import load_profile

        loaded = load_profile(profile)
        engine = _engine(
            loaded,
            trace,
            pool_mb,
            page_size,
            eviction,
            starvation_seconds,
            ttl,
            size_factor,
            max_batch,
            kv_level,
        )
        simulated = SimReplay(
            profile=loaded,
            engine=engine,
            slo=slo,
            window_seconds=window_seconds,
            users=users,
            end_seconds=end,
            seed=seed,
        )
        check_losses(simulated.quality_loss, engine.ladder, kv_level, source=loaded.name)
        _run(lambda **options: replay_simulated(trace, simulated, **options), len(trace), files[0], out)
        return
    from kvpilot.env.replay.http import HttpReplay, replay_http

    if users is not None:
        raise ConfigError("users is for --on sim: against a server the arrivals are as recorded")
    against = HttpReplay(
        url=on.rstrip("/"),
        model=model,
        slo=slo,
        prompts=prompts,
        vocab_size=vocab_size,
        window_seconds=window_seconds,
        end_seconds=end,
        drain_seconds=drain,
        seed=seed,
    )
    _run(lambda **options: replay_http(trace, against, **options), len(trace), files[0], out)


def calibrate(
    out: Annotated[
        Path, Option("--out", "-o", help="The profile; the measured steps lie beside it as .jsonl.")
    ],
    model: Annotated[str, Option(help="As for `autotune serve`.")] = "smollm2",
    name: Annotated[str | None, Option(help="Of the profile. [default: the file's]")] = None,
    threads: Annotated[int | None, Option(min=1, help="CPU threads. [default: all cores]")] = None,
    page_size: Annotated[int, Option(help="Tokens per page.")] = 32,
    prefill_chunk: Annotated[int, Option(help="Prompt tokens per step.")] = 256,
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

        autotune replay trace.jsonl --profile ./my-machine.json
    """
    from kvpilot.agent.simulate.calibrate import CalibrateConfig, run_calibration

    check_out(out, ".json")
    config = CalibrateConfig(
        out=out,
        model=model,
        name=name or out.stem,
        threads=threads,
        page_size=page_size,
        prefill_chunk=prefill_chunk,
        quick=quick,
        note=note,
        fit_only=fit_only,
        seed=seed,
    )
    raise typer.Exit(run_calibration(config))


def sensitivity(
    trace: Annotated[Path, Option(help="The traffic.")],
    out: Annotated[
        Path, Option("--out", "-o", help="The table as JSON; the plots lie beside it as .html.")
    ] = Path("sensitivity.json"),
    at: Annotated[
        str | None,
        Option(
            help="Where the other knobs stand: kv_level=1,max_batch=32. [default: the best of the sweeps]"
        ),
    ] = None,
    rounds: Annotated[int, Option(min=1, help="Sweeps; each starts from the best of the one before.")] = 2,
    quality_weight: Annotated[
        float, Option(help="What a quality loss of 1 nat per token costs in goodput, to find `best`.")
    ] = 100.0,
    processes: Annotated[int, Option(min=1, help="Simulations at once.")] = 2,
    slo_ttft: SloTtft = 5.0,
    slo_itl: SloItl = 0.1,
    sample: Sample = 1.0,
    seed: Seed = 0,
    users: Users = None,
    seconds: Seconds = None,
    max_tokens: MaxTokens = None,
    file_format: FileFormat = "auto",
    session_rate: SessionRate = 1 / 60,
    profile: Profile = DEFAULT_PROFILE,
    pool_mb: PoolMb = None,
    page_size: PageSize = None,
    eviction: Eviction = "lru",
    starvation_seconds: Starvation = 300.0,
) -> None:
    """Sweep each knob alone in the simulator, and say what it moves.

    The other knobs stand at the best settings found. Ctrl-C shows what there is.

        autotune sensitivity --trace conversation.jsonl --sample 0.125 --pool-mb 40000
    """
    from kvpilot.agent.simulate.sensitivity import SensitivityConfig, run_sensitivity
    from kvpilot.env.replay.limits import check_losses, check_number
    from kvpilot.env.replay.result import Slo
    from kvpilot.env.replay.sim import SimReplay
    from kvpilot.env.simulator.latency import load_profile

    check_out(out, ".json")
    check_number(quality_weight, name="--quality-weight", low=0.0)
    _check_traffic(sample, session_rate, seconds)
    traffic = _read(trace, file_format, session_rate, sample, seed, max_tokens)
    loaded = load_profile(profile)
    engine = _engine(loaded, traffic, pool_mb, page_size, eviction, starvation_seconds, 0.0, 0.0, None, 0)
    replay = SimReplay(
        profile=loaded,
        engine=engine,
        slo=Slo(ttft_seconds=slo_ttft, inter_token_seconds=slo_itl),
        users=users,
        end_seconds=seconds if seconds is not None else float("inf"),
        seed=seed,
    )
    check_losses(replay.quality_loss, engine.ladder, len(engine.ladder) - 1, source=loaded.name)
    config = SensitivityConfig(
        replay=replay,
        out=out,
        at=_parse_knobs(at),
        rounds=rounds,
        quality_weight=quality_weight,
        processes=processes,
    )
    raise typer.Exit(run_sensitivity(traffic, config))


# ---------------------------------------------------------------------- parts
def _check_traffic(sample: float, session_rate: float, seconds: float | None) -> None:
    """Options that typer's bounds cannot hold: they let nan pass."""
    from kvpilot.env.replay.limits import check_number

    check_number(sample, name="--sample", above=0.0)
    check_number(session_rate, name="--session-rate", above=0.0)
    if seconds is not None:
        check_number(seconds, name="--seconds", above=0.0)


def _read(
    path: Path, file_format: str, session_rate: float, sample: float, seed: int, max_tokens: int | None
) -> "Trace":
    from kvpilot.env.traces.compose import drop_longer, sample_sessions
    from kvpilot.env.traces.readers import ReadOptions, read_trace

    options = ReadOptions(seed=seed, sessions_per_second=session_rate)
    trace = read_trace(path, file_format, options=options)
    if sample != 1.0:
        trace = sample_sessions(trace, sample, seed=seed)
    return trace if max_tokens is None else drop_longer(trace, max_tokens)


def _engine(
    profile: "LatencyProfile",
    trace: "Trace",
    pool_mb: int | None,
    page_size: int | None,
    eviction: str,
    starvation_seconds: float,
    ttl: float,
    size_factor: float,
    max_batch: int | None,
    kv_level: int,
) -> "EngineConfig":
    """The envelope: what is asked for, else the profile's, else the engine's defaults."""
    from kvpilot.engine.config import Knobs

    known = profile.engine_config()
    ceiling = known.max_batch_ceiling
    if max_batch is not None and max_batch > ceiling:
        raise ConfigError(
            f"--max-batch={max_batch} is invalid: expected at most {ceiling}, "
            f"the max_batch_ceiling of profile {profile.name!r}"
        )
    changes = {} if pool_mb is None else {"pool_bytes": pool_mb << 20}
    return profile.engine_config(
        **changes,
        page_size=trace.block_size if page_size is None else page_size,
        eviction=eviction,
        starvation_seconds=starvation_seconds,
        knobs=Knobs(
            ttl_seconds=ttl,
            size_factor=size_factor,
            max_batch=known.knobs.max_batch if max_batch is None else max_batch,
            kv_level=kv_level,
        ),
    )


def _run(replay: Any, total: int, source: Path, out: Path) -> None:
    """With a progress bar, and Ctrl-C as a question; then writes and shows the result."""
    from dataclasses import replace
    from datetime import UTC, datetime
    from importlib.metadata import version

    from rich.console import Console
    from rich.markup import escape

    from kvpilot.agent.interrupt import interruptible
    from kvpilot.agent.progress import progress_bar
    from kvpilot.env.replay.report import write_report

    console = Console()
    with interruptible() as is_stopped, progress_bar("replaying", total, console) as advance:
        result = replay(progress=lambda done, total: advance(done), is_stopped=is_stopped)
        interrupted = is_stopped()
    facts = {
        "version": version("kvpilot"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["autotune", *sys.argv[1:]]),
    }
    result = replace(
        result, trace={"name": source.name, **result.trace}, provenance={**result.provenance, **facts}
    )
    result.write(out)
    page = out.with_suffix(".html")
    write_report([(out.stem, result)], page)
    _show([(out.stem, result)], console)
    if result.is_partial:
        console.print("[yellow]stopped before the end of the trace: these are the figures until then[/]")
    console.print(escape(f"{out} and {page}"))
    if interrupted:
        raise typer.Exit(130)


def _compare(files: list[Path], out: Path) -> None:
    from rich.console import Console
    from rich.markup import escape

    from kvpilot.env.replay.compare import names_of, page_of, warnings_of
    from kvpilot.env.replay.report import write_report
    from kvpilot.env.replay.result import read_result

    if len(files) < 2:
        raise ConfigError(f"--compare with {len(files)} result is invalid: expected two or more")
    page = page_of(out, files)
    results = [(name, read_result(file)) for name, file in zip(names_of(files), files, strict=True)]
    write_report(results, page)
    console = Console()
    _show(results, console)
    for warning in warnings_of(results):
        console.print(f"[yellow]{escape(warning)}[/]")
    typer.echo(page)


def _refuse_replay_options(context: typer.Context) -> None:
    """They say how to replay, and --compare replays nothing."""
    given = [
        option.opts[0]
        for option in context.command.params
        if option.name not in ("files", "out", "compare")
        and (source := context.get_parameter_source(option.name or ""))
        and source.name == "COMMANDLINE"
    ]
    if given:
        raise ConfigError(f"{', '.join(given)} with --compare: expected only results and --out")


def _show(results: list[Any], console: Any) -> None:
    from rich.markup import escape
    from rich.table import Table

    from kvpilot.env.replay.compare import describe
    from kvpilot.env.replay.report import change_title, figure_rows, unanswered

    table = Table(
        "",
        *(escape(name) for name, _ in results),
        *([change_title(len(results))] if len(results) > 1 else []),
    )
    for column in table.columns[1:]:
        column.justify = "right"
    style = {"good": "green", "bad": "red", "even": "dim"}
    for row in figure_rows([result for _, result in results]):
        change = [f"[{style[row.verdict]}]{row.change}[/]"] if len(results) > 1 else []
        table.add_row(row.label, *row.values, *change)
    console.print(table)
    for name, result in results:
        if len(results) > 1:
            console.print(f"{escape(name)}: {escape(describe(result))}")
        answered = result.summary["status"].get("done", 0)
        whose = f"{escape(name)}: " if len(results) > 1 else ""
        for line in unanswered(result):
            console.print(f"[yellow]{whose}{escape(line)}[/]")
        if answered:
            console.print(f"{whose}percentiles are over the {answered:,} answered requests")
        else:
            console.print(f"[red]{whose}no request was answered: there are no latencies to show[/]")


def check_out(out: Path, suffix: str) -> None:
    """Before long work. Raises ConfigError."""
    from kvpilot.env.replay import compare

    compare.check_out(out, suffix)


def _parse_knobs(text: str | None) -> dict[str, float] | None:
    if text is None:
        return None
    try:
        pairs = [part.split("=") for part in text.split(",")]
        return {name.strip(): float(value) for name, value in pairs}
    except ValueError:
        raise ConfigError(f"at={text!r} is invalid: expected KNOB=VALUE,KNOB=VALUE") from None
