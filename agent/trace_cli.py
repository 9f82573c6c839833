"""`autotune trace`: describe, compose and convert recorded traffic."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

if TYPE_CHECKING:
    from kvpilot.env.traces.trace import Trace

app = typer.Typer(no_args_is_help=True, help="Describe, compose and convert recorded traffic.")

Format = Annotated[
    str,
    Option("--format", help="auto, mooncake, agentic, azure, jsonl or parquet.", rich_help_panel="Reading"),
]
SkipBad = Annotated[
    bool, Option("--skip-bad", help="Drop bad records, count them and say so.", rich_help_panel="Reading")
]
SessionRate = Annotated[
    float,
    Option("--session-rate", help="Agentic archives: session starts per second.", rich_help_panel="Reading"),
]
BlockSize = Annotated[
    int | None, Option("--block-size", help="Tokens per block: a divisor or multiple of the file's.")
]
Seed = Annotated[int, Option("--seed", help="Of all that is drawn.")]


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
    import json

    from rich.console import Console

    from kvpilot.agent.trace_report import show, write_page
    from kvpilot.env.traces.summary import summarize

    wanted = _parse_sizes(sizes)
    summaries = []
    with _Progress() as progress:
        for file in files:
            trace = _read(file, file_format, skip_bad, session_rate, seed, progress)
            if block_size is not None:
                trace = trace.with_block_size(block_size)
            summaries.append((file.name, summarize(trace, sizes=wanted, progress=progress.step)))
    if as_json:
        typer.echo(json.dumps({name: summary.as_dict() for name, summary in summaries}, indent=2))
    else:
        show(summaries, Console())
    if html is not None:
        write_page(summaries, html)


@app.command("compose")
def compose_(
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
        float, Option(help="Share of the sessions to keep.", rich_help_panel="Each file")
    ] = 1.0,
    scale: Annotated[
        float,
        Option(help="Times as many arrivals, by sessions, not by the clock.", rich_help_panel="Each file"),
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
        float | None, Option(help="Squeeze the curve into so long.", rich_help_panel="Each file")
    ] = None,
    requests: Annotated[
        int | None, Option(help="To generate from ServeGen lengths.", rich_help_panel="Each file")
    ] = None,
    block_size: BlockSize = None,
    shrink: Annotated[
        int, Option(help="Divide all lengths and the block size.", rich_help_panel="Each file")
    ] = 1,
    max_tokens: Annotated[
        int | None,
        Option(help="Drop requests with more, prompt and reply together.", rich_help_panel="Each file"),
    ] = None,
    max_prompt_tokens: Annotated[
        int | None, Option(help="Cut longer prompts.", rich_help_panel="Each file")
    ] = None,
    max_output_tokens: Annotated[
        int | None, Option(help="Cut longer replies.", rich_help_panel="Each file")
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
    from kvpilot.env.traces.files import check_output, write_trace
    from kvpilot.env.traces.spec import ComposeSpec, CurveSpec, SourceSpec, load_spec, run_spec

    check_output(out)
    if (spec is None) != bool(files):
        raise typer.BadParameter("give either FILEs or --spec")
    rates = None if curve is None else CurveSpec(file=curve, client=curve_client, seconds=curve_seconds)
    wanted = (
        load_spec(spec)
        if spec is not None
        else ComposeSpec(
            sources=tuple(
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
            ),
            combine=combine,
            switch_seconds=tuple(switch_at or ()),
            seed=seed,
            window=_parse_window(window),
        )
    )
    with _Progress() as progress:
        trace = run_spec(wanted, lambda done, total: progress.step("sources", done, total))
        _say_skipped(trace.provenance)
        write_trace(trace, out)
    _say_written(trace, out)


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
    from kvpilot.env.traces.files import check_output, write_trace

    check_output(target)
    with _Progress() as progress:
        trace = _read(source, file_format, skip_bad, session_rate, seed, progress)
        if block_size is not None:
            trace = trace.with_block_size(block_size)
        write_trace(trace, target)
    _say_written(trace, target)


# ---------------------------------------------------------------------- parts
class _Progress:
    """One bar on stderr, gone at the end."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True)
        self._bars = Progress(console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bars.add_task("", total=None)

    def __enter__(self) -> "_Progress":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def step(self, name: str, done: int, total: int) -> None:
        self._bars.update(self._task, description=name, completed=done, total=total or None)


def _read(
    path: Path, file_format: str, skip_bad: bool, session_rate: float, seed: int, progress: _Progress
) -> "Trace":
    from kvpilot.env.traces.readers import ReadOptions, read_trace

    options = ReadOptions(seed=seed, sessions_per_second=session_rate)
    trace = read_trace(
        path, file_format, skip_bad, options, lambda done, total: progress.step(path.name, done, total)
    )
    _say_skipped(trace.provenance)
    return trace


def _say_skipped(provenance: Any) -> None:
    """Every reading that dropped records, also of the sources of a mixture."""
    for entry in provenance:
        for source in entry.get("sources", ()):
            _say_skipped(source)
        if entry.get("skipped"):
            typer.echo(
                f"skipped {entry['skipped']} bad records; the first: {entry['first_skipped']}", err=True
            )


def _say_written(trace: "Trace", path: Path) -> None:
    typer.echo(
        f"{path}: {len(trace)} requests over {trace.duration_seconds:.0f} s, "
        f"{len(trace.block_ids)} blocks of {trace.block_size} tokens, {path.stat().st_size / 1e6:.1f} MB"
    )


def _parse_window(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        start, stop = (float(part) for part in text.split(":"))
    except ValueError:
        raise typer.BadParameter(f"{text!r}: expected START:STOP in seconds", param_hint="--window") from None
    return start, stop


def _parse_sizes(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise typer.BadParameter(f"{text!r}: expected numbers of blocks, as 2000,5000", param_hint="--sizes")
    return sizes
