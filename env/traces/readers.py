"""`read_trace`: any supported file as a `Trace`. What a format leaves open is chosen by options, seeded."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from kvpilot.env.traces.agentic import read_agentic
from kvpilot.env.traces.builder import TraceBuilder
from kvpilot.env.traces.detect import FORMATS, detect
from kvpilot.env.traces.own_jsonl import read_own_jsonl
from kvpilot.env.traces.parquet import read_parquet
from kvpilot.env.traces.source import BadRecord, Source, block_list, integer, number, parse_object
from kvpilot.env.traces.trace import Trace, TraceError

MOONCAKE_BLOCK = 512
COARSE_TICK_SECONDS = 1.0  # timestamps on a grid as wide as this get a place within their tick


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """What some formats leave open."""

    seed: int = 0  # of all that is drawn
    sessions_per_second: float = 1 / 60  # agentic archives: rate of the Poisson process of session starts
    block_size: int = 64  # formats with lengths alone: the size of their (unique) blocks

    def __post_init__(self) -> None:
        if not 0 < self.sessions_per_second < math.inf:
            raise TraceError(
                f"sessions_per_second={self.sessions_per_second!r} is invalid: expected a number > 0"
            )
        if self.block_size < 1:
            raise TraceError(f"block_size={self.block_size!r} is invalid: expected >= 1")


def read_trace(
    path: Path | str,
    format: str = "auto",
    skip_bad: bool = False,
    options: ReadOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Trace:
    """Read a file: plain, .gz or .xz by content. TraceError names file, line and field of the first bad record.

    `format` is one of FORMATS or "auto". With `skip_bad` bad records are dropped and counted in the last entry of
    `provenance` ("skipped", "first_skipped"). `progress` gets requests or archive members done, and the total (0:
    not known).
    """
    source, options = Source(Path(path), skip_bad=skip_bad), options or ReadOptions()
    if format not in ("auto", *FORMATS):
        raise TraceError(f"format={format!r} is invalid: expected auto, {', '.join(FORMATS)}")
    kind = detect(source) if format == "auto" else format
    match kind:
        case "mooncake":
            return _read_mooncake(source, options)
        case "azure":
            return _read_azure(source, options)
        case "agentic":
            return read_agentic(source, options.sessions_per_second, options.seed, progress)
        case "jsonl":
            return read_own_jsonl(source)
        case "parquet":
            return read_parquet(source)
    raise TraceError(f"{path}: {kind} is not a trace but {FORMATS[kind]}: use it to modulate or generate one")


def _read_mooncake(source: Source, options: ReadOptions) -> Trace:
    """`hash_ids` has one id per 512 tokens begun; the id of a partial last block is left out."""
    builder = TraceBuilder(source, MOONCAKE_BLOCK)
    for line, text in source.lines():
        try:
            record = parse_object(text)
            stamp = number(record, "timestamp", low=0)
            prompt = integer(record, "input_length", low=1)
            ids = block_list(record, "hash_ids")
            begun = -(-prompt // MOONCAKE_BLOCK)
            if len(ids) != begun:
                raise BadRecord(
                    f"field hash_ids has {len(ids)} ids: expected {begun} for input_length={prompt}"
                )
            builder.add(
                line,
                arrival=stamp / 1000,
                prompt_tokens=prompt,
                output_tokens=integer(record, "output_length", low=1),
                blocks=ids[: prompt // MOONCAKE_BLOCK],
            )
        except BadRecord as problem:
            source.reject(line, problem)
    trace = builder.build(file_format="mooncake")
    gaps = np.diff(np.unique(trace.arrival_seconds))
    coarse = len(gaps) > 0 and gaps.min() >= COARSE_TICK_SECONDS
    return _jitter(trace, float(gaps.min()), options.seed) if coarse else trace


def _jitter(trace: Trace, tick_seconds: float, seed: int) -> Trace:
    """Arrivals within their tick, in the order of the file: ticks stay apart, and so sorting keeps it."""
    rng = np.random.default_rng(seed)
    arrivals = np.sort(trace.arrival_seconds + rng.uniform(0, tick_seconds, len(trace)))
    step = {"step": "jitter", "tick_seconds": tick_seconds, "seed": seed}
    return trace.replace(arrival_seconds=arrivals, provenance=(*trace.provenance, step))


def _read_azure(source: Source, options: ReadOptions) -> Trace:
    """Lengths and times alone: no two requests share a block, each is a session."""
    builder = TraceBuilder(source, options.block_size)
    first: datetime | None = None
    num_blocks = 0
    for line, text in source.lines():
        if line == 1:  # TIMESTAMP,ContextTokens,GeneratedTokens
            continue
        try:
            when, prompt, output = _azure_row(text)
            first = first or when
            full = prompt // options.block_size
            builder.add(
                line,
                arrival=(when - first).total_seconds(),
                prompt_tokens=prompt,
                output_tokens=output,
                blocks=np.arange(num_blocks, num_blocks + full),
                session=len(builder),
            )
            num_blocks += full
        except BadRecord as problem:
            source.reject(line, problem)
    return builder.build(file_format="azure", block_size=options.block_size)


def _azure_row(text: bytes) -> tuple[datetime, int, int]:
    row = text.decode("utf-8", "replace").strip().split(",")
    if len(row) != 3:
        raise BadRecord(f"{len(row)} columns: expected TIMESTAMP,ContextTokens,GeneratedTokens")
    try:
        when = datetime.fromisoformat(row[0]).replace(tzinfo=None)
    except ValueError:
        raise BadRecord(f"field TIMESTAMP={row[0]!r} is invalid: expected a date and time") from None
    lengths = []
    for name, value in zip(("ContextTokens", "GeneratedTokens"), row[1:], strict=True):
        if not value.isascii() or not value.isdecimal() or len(value) > 12 or int(value) < 1:
            raise BadRecord(f"field {name}={value!r} is invalid: expected an integer >= 1")
        lengths.append(int(value))
    return when, lengths[0], lengths[1]
