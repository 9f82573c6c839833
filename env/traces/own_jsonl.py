"""Our own JSON lines, which `autotune serve --record` appends to: lengths, hashes and times, never text.

A request is {"arrival": seconds, "prompt_tokens", "output_tokens", "block_size", "blocks": [ids of full blocks],
"session", "turn", "tenant", "think"}; the last four are optional. Lines {"kvpilot_trace": 1, "provenance": [...]}
may stand anywhere. Requests may stand in any order.
"""

import gzip
import json
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

import numpy as np

from kvpilot.env.traces.builder import TraceBuilder
from kvpilot.env.traces.source import BadRecord, Source, block_list, integer, number, parse_object, shorten
from kvpilot.env.traces.trace import Trace

VERSION = 1
UNIX_SECONDS = 1e8  # arrivals from here on are wall-clock times, and are counted from the first one


def read_own_jsonl(source: Source) -> Trace:
    builder = TraceBuilder(source)
    provenance: list[dict[str, Any]] = []
    for line, text in source.lines():
        try:
            record = parse_object(text)
            if "kvpilot_trace" in record:
                provenance += _header(record)
            else:
                _add(builder, line, record)
        except BadRecord as problem:
            source.reject(line, problem)
    trace = builder.build(provenance, file_format="jsonl")
    if trace.arrival_seconds[0] < UNIX_SECONDS:
        return trace
    start = float(trace.arrival_seconds[0])
    return trace.replace(
        arrival_seconds=trace.arrival_seconds - start,
        provenance=(*trace.provenance, {"step": "start_at_zero", "unix_start": start}),
    )


def _header(record: dict[str, Any]) -> list[dict[str, Any]]:
    if record["kvpilot_trace"] != VERSION:
        raise BadRecord(f"field kvpilot_trace={shorten(record['kvpilot_trace'])}: expected version {VERSION}")
    provenance = record.get("provenance", [])
    if not isinstance(provenance, list) or not all(isinstance(entry, dict) for entry in provenance):
        raise BadRecord(f"field provenance={shorten(provenance)} is invalid: expected a list of objects")
    return provenance


def _add(builder: TraceBuilder, line: int, record: dict[str, Any]) -> None:
    block_size = integer(record, "block_size", low=1)
    if builder.block_size not in (0, block_size):
        raise BadRecord(f"field block_size={block_size} is invalid: expected {builder.block_size} as before")
    builder.block_size = block_size
    builder.add(
        line,
        arrival=number(record, "arrival", low=0),
        prompt_tokens=integer(record, "prompt_tokens", low=1),
        output_tokens=integer(record, "output_tokens", low=1),
        blocks=block_list(record, "blocks"),
        session=integer(record, "session", low=0) if "session" in record else None,
        turn=integer(record, "turn", low=1, bits=31) if "turn" in record else 1,
        tenant=integer(record, "tenant", low=0) if "tenant" in record else 0,
        think=number(record, "think", low=0) if "think" in record else np.nan,
    )


def write_own_jsonl(trace: Trace, path: Path) -> None:
    """Compressed if the name ends in .gz or .xz. Read back, the columns are equal."""
    with _open_for_writing(path) as stream:
        stream.write(json.dumps({"kvpilot_trace": VERSION, "provenance": list(trace.provenance)}) + "\n")
        for i in range(len(trace)):
            stream.write(json.dumps(_record(trace, i), separators=(",", ":")) + "\n")


@contextmanager
def _open_for_writing(path: Path) -> Iterator[TextIO]:
    """No time or name goes into the gzip header: the same trace gives the same bytes."""
    with path.open("wb") as raw:
        match path.suffix:
            case ".gz":
                packed = gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0)
            case ".xz":
                packed = lzma.LZMAFile(raw, "wb")  # noqa: SIM115 - closed by the text layer
            case _:
                packed = raw
        with TextIOWrapper(cast(BinaryIO, packed), encoding="utf-8") as stream:
            yield stream


def _record(trace: Trace, i: int) -> dict[str, Any]:
    record: dict[str, Any] = {
        "arrival": float(trace.arrival_seconds[i]),
        "prompt_tokens": int(trace.prompt_tokens[i]),
        "output_tokens": int(trace.output_tokens[i]),
        "block_size": trace.block_size,
        "blocks": trace.blocks_of(i).tolist(),
        "session": int(trace.session[i]),
        "turn": int(trace.turn[i]),
        "tenant": int(trace.tenant[i]),
    }
    if np.isfinite(trace.think_seconds[i]):
        record["think"] = float(trace.think_seconds[i])
    return record
