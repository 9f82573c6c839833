"""`autotune trace`: describe, compose and convert recorded traffic."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from kvpilot.agent.commands.given import given_flags
from kvpilot.agent.commands.trace_names import flag, named_as
from kvpilot.agent.commands.trace_options import (
    BlockSize,
    Format,
    Seed,
    SessionRate,
    SkipBad,
    above_zero,
    check_page,
    check_switches,
    parse_sizes,
    parse_window,
)

app = typer.Typer(no_args_is_help=True, help="Describe, compose and convert recorded traffic.")


@app.command()
def info(
    files: Annotated[list[Path], Argument(metavar="FILE...")],
    html: Annotated[Path | None, Option(help="Write the plots as one page that needs nothing else.")] = None,
    as_json: Annotated[bool, Option("--json", help="For machines.")] = False,
    block_size: BlockSize = None,
    sizes: Annotated[str | None, Option(help="Cache sizes of the hit-rate curve, blocks: 2000,5000.")] = None,
    file_format: Format = "auto",
    skip_bad: SkipBad = False,
    session_rate: SessionRate = 1 / 60,
    seed: Seed = 0,
) -> None:
    """Rates, lengths, turns, reuse, and what a prefix cache of each size could hit (LRU and optimal).

    autotune trace info conversation.jsonl --html info.html
    """
    from kvpilot.agent.simulate.trace import Reading, run_info

    wanted = parse_sizes(sizes)
    if html is not None:
        check_page(html, files)
    reading = Reading(
        format=file_format,
        skip_bad=skip_bad,
        sessions_per_second=session_rate,
        seed=seed,
        block_size=block_size,
    )
    with named_as(flag):
        run_info(files, reading, sizes=wanted, as_json=as_json, html=html)


# Long: a parameter per flag.
@app.command("compose")
def compose_(
    context: typer.Context,
    out: Annotated[Path, Option("--out", "-o", help="By its name .parquet, .jsonl, .jsonl.gz or .jsonl.xz.")],
    files: Annotated[list[Path] | None, Argument(metavar="[FILE...]")] = None,
    spec: Annotated[
        Path | None, Option(help="A TOML file that says all of this for each source; instead of FILEs.")
    ] = None,
    combine: Annotated[str, Option(help="Several files: mix, switch or concatenate.")] = "mix",
    switch_at: Annotated[
        list[float] | None, Option(help="Second at which the next file takes over; once per switch.")
    ] = None,
    window: Annotated[str | None, Option(help="Keep only these seconds of the result: 600:1200.")] = None,
    seed: Seed = 0,
    sample: Annotated[
        float,
        Option(callback=above_zero(1), help="Share of the sessions to keep.", rich_help_panel="Each file"),
    ] = 1.0,
    scale: Annotated[
        float,
        Option(
            callback=above_zero(1000),
            help="Times as many arrivals, by sessions, not by the clock.",
            rich_help_panel="Each file",
        ),
    ] = 1.0,
    curve: Annotated[
        Path | None,
        Option(
            help="Session starts follow these rates: ServeGen rates, or the arrivals of a trace.",
            rich_help_panel="Each file",
        ),
    ] = None,
    curve_client: Annotated[
        str, Option(help="Which ServeGen clients, e.g. language/m-large.", rich_help_panel="Each file")
    ] = "",
    curve_seconds: Annotated[
        float | None,
        Option(callback=above_zero(), help="Squeeze the curve into so long.", rich_help_panel="Each file"),
    ] = None,
    requests: Annotated[
        int | None, Option(min=1, help="To generate from ServeGen lengths.", rich_help_panel="Each file")
    ] = None,
    block_size: BlockSize = None,
    shrink: Annotated[
        int, Option(min=1, help="Divide all lengths and the block size.", rich_help_panel="Each file")
    ] = 1,
    max_tokens: Annotated[
        int | None,
        Option(
            min=1, help="Drop requests with more, prompt and reply together.", rich_help_panel="Each file"
        ),
    ] = None,
    max_prompt_tokens: Annotated[
        int | None, Option(min=1, help="Cut longer prompts.", rich_help_panel="Each file")
    ] = None,
    max_output_tokens: Annotated[
        int | None, Option(min=1, help="Cut longer replies.", rich_help_panel="Each file")
    ] = None,
    file_format: Format = "auto",
    skip_bad: SkipBad = False,
    session_rate: SessionRate = 1 / 60,
) -> None:
    """Make new traffic of recorded sessions: sample, scale, modulate, mix, switch. Same seed, same result.

    Time within a session is never stretched, so reuse intervals stay what they were. What was done is recorded in
    the result.

        autotune trace compose conversation.jsonl --scale 0.125 -o one-gpu.parquet

        autotune trace compose chat.jsonl code.parquet --combine switch --switch-at 600 -o drift.parquet
    """
    from kvpilot.agent.simulate.trace import run_compose
    from kvpilot.env.traces.files import check_output
    from kvpilot.env.traces.spec import ComposeSpec, CurveSpec, SourceSpec, load_spec

    check_output(out)
    if (spec is None) != bool(files):
        raise typer.BadParameter("give either FILEs or --spec")
    if spec is not None:
        beside = given_flags(context, but=("spec", "out"))
        if beside:  # it would be ignored
            raise typer.BadParameter(f"{', '.join(beside)} beside --spec: say it in the spec file")
        with named_as(lambda key: f"{spec}: {key}"):
            run_compose(load_spec(spec), out, spec)
        return
    check_switches(combine, switch_at or (), len(files or ()))
    if curve is None and (curve_client or curve_seconds is not None):
        raise typer.BadParameter("--curve-client and --curve-seconds go with --curve")
    rates = None if curve is None else CurveSpec(file=curve, client=curve_client, seconds=curve_seconds)
    sources = tuple(
        SourceSpec(
            file=file,
            format=file_format,
            skip_bad=skip_bad,
            sessions_per_second=session_rate,
            max_tokens=max_tokens,
            max_prompt_tokens=max_prompt_tokens,
            max_output_tokens=max_output_tokens,
            shrink=shrink,
            block_size=block_size,
            sample=sample,
            scale=scale,
            curve=rates,
            requests=requests,
        )
        for file in files or ()
    )
    with named_as(flag):
        wanted = ComposeSpec(
            sources=sources,
            combine=combine,
            switch_seconds=tuple(switch_at or ()),
            seed=seed,
            window=parse_window(window),
        )
        run_compose(wanted, out)


@app.command()
def convert(
    source: Annotated[Path, Argument(metavar="IN")],
    target: Annotated[Path, Argument(metavar="OUT")],
    block_size: BlockSize = None,
    file_format: Format = "auto",
    skip_bad: SkipBad = False,
    session_rate: SessionRate = 1 / 60,
    seed: Seed = 0,
) -> None:
    """Read any known format, write our own: OUT ends in .parquet, .jsonl, .jsonl.gz or .jsonl.xz.

    autotune trace convert sessions.tar.xz sessions.parquet --session-rate 0.05
    """
    from kvpilot.agent.simulate.trace import Reading, run_convert

    reading = Reading(
        format=file_format,
        skip_bad=skip_bad,
        sessions_per_second=session_rate,
        seed=seed,
        block_size=block_size,
    )
    with named_as(flag):
        run_convert(source, target, reading)
