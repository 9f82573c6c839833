"""`autotune trace`: describe, compose and convert recorded traffic."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

if TYPE_CHECKING:
    from kvpilot.env.traces.spec import ComposeSpec
    from kvpilot.env.traces.trace import Trace

app = typer.Typer(no_args_is_help=True, help="Describe, compose and convert recorded traffic.")

KEYS = {  # what an error may call a setting, and its key in a spec
    **{
        name: name
        for name in (
            *("format", "sessions_per_second", "block_size", "combine", "switch_seconds", "window"),
            *("max_tokens", "max_prompt_tokens", "max_output_tokens"),
        )
    },
    "factor": "scale",
    "fraction": "sample",
    "divisor": "shrink",
    "at_seconds": "switch_seconds",
    "num_requests": "requests",
}
FLAGS = {
    "sessions_per_second": "session-rate",
    "switch_seconds": "switch-at",
}  # where not the same as the key


def _above_zero(high: float = math.inf) -> Callable[[float | None], float | None]:
    """A check of an option: a finite number in (0, high]."""

    def check(value: float | None) -> float | None:
        if value is not None and not (0 < value <= high and math.isfinite(value)):
            bounds = f"in (0, {high:g}]" if math.isfinite(high) else "> 0"
            raise typer.BadParameter(f"{value:g}: expected a number {bounds}")
        return value

    return check


Format = Annotated[
    str,
    Option("--format", help="auto, mooncake, agentic, azure, jsonl or parquet.", rich_help_panel="Reading"),
]
SkipBad = Annotated[
    bool, Option("--skip-bad", help="Drop bad records, count them and say so.", rich_help_panel="Reading")
]
SessionRate = Annotated[
    float,
    Option(
        "--session-rate",
        callback=_above_zero(),
        help="Agentic archives: session starts per second.",
        rich_help_panel="Reading",
    ),
]
BlockSize = Annotated[
    int | None, Option("--block-size", min=1, help="Tokens per block: a divisor or multiple of the file's.")
]
Seed = Annotated[int, Option("--seed", min=0, help="Of all that is drawn.")]


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

    from kvpilot.agent.simulate.trace_report import show, write_page
    from kvpilot.env.traces.summary import summarize

    wanted = _parse_sizes(sizes)
    if html is not None:
        _check_page(html, files)
    summaries = []
    with _Progress() as progress, _named_as(_flag):
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
        Option(callback=_above_zero(1), help="Share of the sessions to keep.", rich_help_panel="Each file"),
    ] = 1.0,
    scale: Annotated[
        float,
        Option(
            callback=_above_zero(1000),
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
        Option(callback=_above_zero(), help="Squeeze the curve into so long.", rich_help_panel="Each file"),
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
    from kvpilot.env.traces.files import check_output
    from kvpilot.env.traces.spec import ComposeSpec, CurveSpec, SourceSpec, load_spec

    check_output(out)
    if (spec is None) != bool(files):
        raise typer.BadParameter("give either FILEs or --spec")
    if spec is not None:
        _refuse_beside_spec(context)
        with _named_as(lambda key: f"{spec}: {key}"):
            _compose(load_spec(spec), out, spec)
        return
    _check_switches(combine, switch_at or (), len(files or ()))
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
    with _named_as(_flag):
        wanted = ComposeSpec(
            sources=sources,
            combine=combine,
            switch_seconds=tuple(switch_at or ()),
            seed=seed,
            window=_parse_window(window),
        )
        _compose(wanted, out, None)


def _compose(wanted: "ComposeSpec", out: Path, spec: Path | None) -> None:
    from kvpilot.env.traces.files import write_trace
    from kvpilot.env.traces.spec import run_spec
    from kvpilot.env.traces.trace import TraceError

    if wanted.seed < 0:
        raise TraceError(f"{spec}: seed={wanted.seed} is invalid: expected >= 0")
    inputs = [source.file for source in wanted.sources]
    inputs += [source.curve.file for source in wanted.sources if source.curve is not None]
    _check_target(out, [*inputs, *([] if spec is None else [spec])])
    for file in inputs:
        _check_input(file)
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
    _check_target(target, [source])
    with _Progress() as progress, _named_as(_flag):
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

    _check_input(path)
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


# ---------------------------------------------------------------------- checks before the work
def _check_input(path: Path) -> None:
    """What is no file with something in it, by name; what does not exist is said by the reader."""
    from kvpilot.env.traces.trace import TraceError

    if path.is_dir():
        raise TraceError(f"{path}: is a folder: expected a file")
    if path.exists() and not path.is_file():
        raise TraceError(f"{path}: is a device or a pipe: expected a regular file")
    if path.is_file() and not os.access(path, os.R_OK):
        raise TraceError(f"{path}: may not be read: see its permissions")
    if path.is_file() and path.stat().st_size == 0:
        raise TraceError(f"{path}: the file is empty")


def _check_target(path: Path, inputs: Sequence[Path]) -> None:
    """Reading must not end in overwriting what was read."""
    from kvpilot.env.traces.trace import TraceError

    if path.is_dir():
        raise TraceError(f"{path}: is a folder: expected the name of a file to write")
    for source in inputs:
        if path.exists() and source.exists() and path.samefile(source):
            raise TraceError(
                f"{path}: is the same file as the source {source}: expected another name to write to"
            )


def _check_page(path: Path, inputs: Sequence[Path]) -> None:
    if not path.parent.is_dir():
        raise typer.BadParameter(f"{path}: there is no folder {path.parent}", param_hint="--html")
    _check_target(path, inputs)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"{path}: may not be written", param_hint="--html")


def _check_switches(combine: str, switch_at: Sequence[float], num_files: int) -> None:
    if (combine == "switch") != bool(switch_at):
        raise typer.BadParameter("--combine switch and --switch-at go together")
    rising = all(a < b < math.inf for a, b in pairwise([0.0, *switch_at]))
    if switch_at and (len(switch_at) != num_files - 1 or not rising):
        raise typer.BadParameter(
            f"{', '.join(f'{at:g}' for at in switch_at)}: expected one less than files, rising, each > 0",
            param_hint="--switch-at",
        )


def _refuse_beside_spec(context: typer.Context) -> None:
    """What is said by a flag would be ignored: the spec says all of it."""
    beside = []
    for param in context.command.params:
        source = context.get_parameter_source(param.name or "")
        if param.name not in ("spec", "out") and source is not None and source.name == "COMMANDLINE":
            beside.append(param.opts[0])
    if beside:
        raise typer.BadParameter(f"{', '.join(beside)} beside --spec: say it in the spec file")


def _flag(key: str) -> str:
    return "--" + FLAGS.get(key, key).replace("_", "-")


@contextmanager
def _named_as(name_of: Callable[[str], str]) -> Iterator[None]:
    """A setting that an error begins with is called as `name_of` its key in a spec."""
    from kvpilot.env.traces.trace import TraceError

    try:
        yield
    except TraceError as error:
        name, equals, rest = str(error).partition("=")
        if name not in KEYS:
            raise
        raise TraceError(name_of(KEYS[name]) + equals + rest) from error
