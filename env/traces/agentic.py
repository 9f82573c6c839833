"""Archives of agentic coding sessions: one JSON file per session, sub-agents nested, block ids local to a session."""

from collections.abc import Callable
from typing import Any

import numpy as np

from kvpilot.env.traces.builder import TraceBuilder
from kvpilot.env.traces.source import (
    BadRecord,
    Source,
    archive_members,
    block_list,
    integer,
    number,
    parse_object,
    shorten,
)
from kvpilot.env.traces.trace import Trace


def read_agentic(
    source: Source,
    sessions_per_second: float,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> Trace:
    """All sessions, in random order, each started by a Poisson process; within a session times are as recorded.

    A session's sub-agents are part of it: turns count its requests by time, whoever sent them. `think_seconds` is
    the recorded time between two requests that is not the API's, for closed-loop replay. A reply of no tokens
    counts as one: its prompt was computed.
    """
    builder = TraceBuilder(source)
    num_ids = num_sessions = 0
    bounds: list[tuple[int, int]] = []  # rows of each session
    for name, text in archive_members(source, "", ".json"):
        first_row = len(builder)
        try:
            num_ids += _add_session(builder, name, parse_object(text), num_sessions, num_ids)
        except BadRecord as problem:
            source.reject(name, problem)
        if len(builder) > first_row:
            bounds.append((first_row, len(builder)))
            num_sessions += 1
        if progress is not None:
            progress(num_sessions, 0)
    rng = np.random.default_rng(seed)
    starts = np.cumsum(rng.exponential(1 / sessions_per_second, num_sessions))
    starts = rng.permutation(starts - starts[:1])
    for (first, stop), start in zip(bounds, starts, strict=True):
        builder.shift(first, stop, float(start))
    return builder.build(file_format="agentic", sessions_per_second=sessions_per_second, seed=seed)


def _add_session(
    builder: TraceBuilder, name: str, session: dict[str, Any], number_of: int, id_offset: int
) -> int:
    """Adds its requests; returns how many ids the session uses up."""
    block_size = integer(session, "block_size", low=1)
    builder.block_size = builder.block_size or block_size
    if block_size != builder.block_size:
        raise BadRecord(f"field block_size={block_size} is invalid: expected {builder.block_size} as before")
    turn, previous_end, highest = 0, np.nan, -1
    for place, record, start in _requests_by_time(builder.source, name, session):
        try:
            prompt = integer(record, "in", low=1)
            blocks = block_list(record, "hash_ids")
            builder.add(
                f"{name}: {place}",
                arrival=start,
                prompt_tokens=prompt,
                output_tokens=max(integer(record, "out", low=0), 1),
                blocks=np.asarray(blocks, dtype=np.int64) + id_offset,
                session=number_of,
                turn=turn + 1,
                think=_think_seconds(record, start, previous_end) if turn else np.nan,
            )
        except BadRecord as problem:
            builder.source.reject(f"{name}: {place}", problem)
            continue
        turn += 1
        highest = max(highest, *blocks, -1)
        previous_end = start + _optional(record, "api_time")
    return highest + 1


def _requests_by_time(
    source: Source, name: str, session: dict[str, Any]
) -> list[tuple[str, dict[str, Any], float]]:
    """(place, request, seconds since the session began), sub-agents' requests among the others."""
    found: list[tuple[str, dict[str, Any], float]] = []

    def collect(records: object, start: float, prefix: str) -> None:
        if not isinstance(records, list):
            raise BadRecord(f"field requests={shorten(records)} is invalid: expected a list")
        for k, record in enumerate(records, 1):
            place = f"{prefix}request {k}"
            try:
                if not isinstance(record, dict):
                    raise BadRecord(f"{shorten(record)} is not a JSON object")
                at = start + number(record, "t", low=0)
                if "requests" in record:
                    collect(record["requests"], at, f"{place}, ")
                else:
                    found.append((place, record, at))
            except BadRecord as problem:
                source.reject(f"{name}: {place}", problem)

    if "requests" not in session:
        raise BadRecord("field requests is missing")
    collect(session["requests"], 0.0, "")
    return sorted(found, key=lambda entry: entry[2])


def _think_seconds(record: dict[str, Any], start: float, previous_end: float) -> float:
    if isinstance(record.get("think_time"), int | float):
        return number(record, "think_time", low=0)
    return max(0.0, start - previous_end)


def _optional(record: dict[str, Any], name: str) -> float:
    return number(record, name, low=0) if isinstance(record.get(name), int | float) else 0.0
