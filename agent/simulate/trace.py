"""`autotune trace`: reads recorded traffic, describes, composes and converts it, and says what it left out."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from kvpilot.agent.progress import Step, step_bar
from kvpilot.agent.simulate.trace_report import show, write_page
from kvpilot.env.traces.files import check_output, check_target, write_trace
from kvpilot.env.traces.readers import ReadOptions, read_trace
from kvpilot.env.traces.source import check_input
from kvpilot.env.traces.spec import ComposeSpec, run_spec
from kvpilot.env.traces.summary import summarize
from kvpilot.env.traces.trace import Trace, TraceError


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How files are read."""

    format: str = "auto"
    skip_bad: bool = False  # bad records are dropped and counted
    sessions_per_second: float = 1 / 60  # of archives that do not say when sessions began
    seed: int = 0
    block_size: int | None = None  # tokens; None: the file's


def run_info(
    files: Sequence[Path], reading: Reading, *, sizes: list[int] | None, as_json: bool, html: Path | None
) -> None:
    """Prints the figures of every file, and writes the page of charts if one is asked for. Raises TraceError."""
    summaries = []
    with step_bar(Console(stderr=True)) as step:
        for file in files:
            summaries.append((file.name, summarize(_read(file, reading, step), sizes=sizes, progress=step)))
    if as_json:
        print(json.dumps({name: summary.as_dict() for name, summary in summaries}, indent=2))
    else:
        show(summaries, Console())
    if html is not None:
        write_page(summaries, html)


def run_compose(wanted: ComposeSpec, out: Path, spec: Path | None = None) -> None:
    """Writes the composed trace; `spec` is the file that says what is wanted, if one does. Raises TraceError."""
    if wanted.seed < 0:
        raise TraceError(f"{spec}: seed={wanted.seed} is invalid: expected >= 0")
    inputs = [source.file for source in wanted.sources]
    inputs += [source.curve.file for source in wanted.sources if source.curve is not None]
    check_target(out, [*inputs, *([] if spec is None else [spec])])
    for file in inputs:
        check_input(file)
    with step_bar(Console(stderr=True)) as step:
        trace = run_spec(wanted, lambda done, total: step("sources", done, total))
        _say_skipped(trace.provenance)
        write_trace(trace, out)
    _say_written(trace, out)


def run_convert(source: Path, target: Path, reading: Reading) -> None:
    """Raises TraceError."""
    check_output(target)
    check_target(target, [source])
    with step_bar(Console(stderr=True)) as step:
        trace = _read(source, reading, step)
        write_trace(trace, target)
    _say_written(trace, target)


def _read(path: Path, reading: Reading, step: Step) -> Trace:
    options = ReadOptions(seed=reading.seed, sessions_per_second=reading.sessions_per_second)
    trace = read_trace(
        path,
        reading.format,
        reading.skip_bad,
        options,
        lambda done, total: step(path.name, done, total),
    )
    _say_skipped(trace.provenance)
    return trace if reading.block_size is None else trace.with_block_size(reading.block_size)


def _say_skipped(provenance: Iterable[Mapping[str, Any]]) -> None:
    """Every reading that dropped records, also of the sources of a mixture."""
    for entry in provenance:
        for source in entry.get("sources", ()):
            _say_skipped(source)
        if entry.get("skipped"):
            print(
                f"skipped {entry['skipped']} bad records; the first: {entry['first_skipped']}",
                file=sys.stderr,
            )


def _say_written(trace: Trace, path: Path) -> None:
    print(
        f"{path}: {len(trace)} requests over {trace.duration_seconds:.0f} s, "
        f"{len(trace.block_ids)} blocks of {trace.block_size} tokens, {path.stat().st_size / 1e6:.1f} MB"
    )
