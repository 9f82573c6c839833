"""New traffic from recorded traffic. Time within a session is never stretched: reuse intervals are the data.

Every function returns a new trace that says in its provenance what was done; what is drawn is drawn from `seed`.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpilot.env.traces.blocks import Floats, Ints, densify, offsets_of, take_ragged
from kvpilot.env.traces.servegen import RateCurve
from kvpilot.env.traces.trace import ROW_COLUMNS, Trace, TraceError


def sample_sessions(trace: Trace, fraction: float, *, seed: int) -> Trace:
    """A random `fraction` in (0, 1] of the sessions (at least one), each whole."""
    if not 0 < fraction <= 1:
        raise TraceError(f"fraction={fraction!r} is invalid: expected a number in (0, 1]")
    sessions = np.unique(trace.session)
    num = max(1, round(fraction * len(sessions)))
    chosen = np.random.default_rng(seed).choice(sessions, num, replace=False)
    sampled = trace.select(np.isin(trace.session, chosen))
    return sampled.noting(step="sample_sessions", fraction=fraction, seed=seed)


def scale_arrivals(trace: Trace, factor: float, *, seed: int, jitter_seconds: float = 300.0) -> Trace:
    """`factor` times the arrivals at the same clock: fewer sessions below 1, copies of sessions above.

    Each copy is a session of its own that starts up to `jitter_seconds` later. Blocks that several sessions share
    (system prompts) stay shared with the copies, all others are new.
    """
    if not 0 < factor <= 1000 or jitter_seconds < 0:
        raise TraceError(f"factor={factor!r} is invalid: expected a number in (0, 1000], jitter_seconds >= 0")
    dense, num_ids = densify(trace.block_ids)
    base = trace.replace(block_ids=dense)
    whole, part = int(factor), factor - int(factor)
    copies = [base] * whole + ([sample_sessions(base, part, seed=seed)] if part > 1e-9 else [])
    shared, num_sessions = shared_blocks(base, num_ids), int(trace.session.max()) + 1
    rng = np.random.default_rng(seed)
    pieces = copies[:1]  # as recorded
    for k, copy in enumerate(copies[1:], 1):
        pieces.append(_renamed(_delayed(copy, rng, jitter_seconds), k, shared, num_sessions))
    result = _join(pieces)
    step = {"step": "scale_arrivals", "factor": factor, "seed": seed, "jitter_seconds": jitter_seconds}
    return result.replace(provenance=(*trace.provenance, step))


def modulate(trace: Trace, curve: RateCurve, *, seed: int, seconds: float | None = None) -> Trace:
    """Let session starts follow a rate curve, spread over `seconds` (default: the curve's own time).

    The starts are redrawn from the curve's shape and given to the sessions in their old order. The number of
    sessions stays: the curve's level does not matter, `scale_arrivals` sets it.
    """
    if seconds is not None and not 0 < seconds < float("inf"):
        raise TraceError(f"seconds={seconds!r} is invalid: expected a number > 0")
    curve = curve.lasting(seconds if seconds is not None else curve.end_seconds - curve.start_seconds[0])
    first, index = session_starts(trace)
    starts = np.empty_like(first)
    starts[np.argsort(first, kind="stable")] = curve.draw_times(len(first), np.random.default_rng(seed))
    step = {"step": "modulate", "curve": curve.name, "seconds": curve.end_seconds, "seed": seed}
    return trace.replace(
        arrival_seconds=trace.arrival_seconds + (starts - first)[index],
        provenance=(*trace.provenance, step),
    )


def mix(traces: Sequence[Trace]) -> Trace:
    """All traces at once, each from its own time 0 on. They share no blocks, sessions or tenants."""
    _check_block_sizes(traces)
    step = {"step": "mix", "sources": [list(trace.provenance) for trace in traces]}
    return _join(_apart(traces)).replace(provenance=(step,))


def switch(traces: Sequence[Trace], at_seconds: Sequence[float]) -> Trace:
    """The first trace until at_seconds[0], then the second from its beginning until at_seconds[1], and so on.

    A hard cut: sessions that are under way end, those of the next trace begin. The last one plays to its end.
    """
    _check_block_sizes(traces)
    edges = [0.0, *at_seconds]
    if len(edges) != len(traces) or any(b <= a for a, b in pairwise(edges)):
        raise TraceError(
            f"at_seconds={list(at_seconds)} is invalid: expected {len(traces) - 1} rising times > 0"
        )
    parts = []
    for trace, start, stop in zip(traces, edges, [*edges[1:], np.inf], strict=True):
        length = stop - start
        rows = trace.select(trace.arrival_seconds < length)
        parts.append(rows.replace(arrival_seconds=rows.arrival_seconds + start))
    sources = [list(trace.provenance) for trace in traces]
    step = {"step": "switch", "at_seconds": list(at_seconds), "sources": sources}
    return _join(_apart(parts)).replace(provenance=(step,))


def concatenate(traces: Sequence[Trace]) -> Trace:
    """One whole trace after the other."""
    _check_block_sizes(traces)
    parts, start = [], 0.0
    for trace in traces:
        parts.append(trace.replace(arrival_seconds=trace.arrival_seconds + start))
        start = float(parts[-1].arrival_seconds[-1]) if len(trace) else start
    step = {"step": "concatenate", "sources": [list(trace.provenance) for trace in traces]}
    return _join(_apart(parts)).replace(provenance=(step,))


def window(trace: Trace, start_seconds: float, stop_seconds: float) -> Trace:
    """What arrives in [start, stop), counted from start. Sessions may lack their beginning or end."""
    arrivals = trace.arrival_seconds
    rows = trace.select((arrivals >= start_seconds) & (arrivals < stop_seconds))
    if not len(rows):
        raise TraceError(f"window=[{start_seconds:g}, {stop_seconds:g}) is invalid: no request arrives in it")
    moved = rows.replace(arrival_seconds=rows.arrival_seconds - start_seconds)
    return moved.noting(step="window", start_seconds=start_seconds, stop_seconds=stop_seconds)


def clip_lengths(
    trace: Trace, *, max_prompt_tokens: int | None = None, max_output_tokens: int | None = None
) -> Trace:
    """Cut prompts off at the end, and replies. Turns of a cut session become alike, which raises the hit rate."""
    for name, value in (("max_prompt_tokens", max_prompt_tokens), ("max_output_tokens", max_output_tokens)):
        if value is not None and value < 1:
            raise TraceError(f"{name}={value!r} is invalid: expected >= 1")
    prompt = np.minimum(trace.prompt_tokens, max_prompt_tokens or trace.prompt_tokens)
    counts = prompt // trace.block_size
    offsets = offsets_of(counts)
    index = np.arange(offsets[-1]) + np.repeat(trace.block_offsets[:-1] - offsets[:-1], counts)
    clipped = trace.replace(
        prompt_tokens=prompt,
        output_tokens=np.minimum(trace.output_tokens, max_output_tokens or trace.output_tokens),
        block_ids=trace.block_ids[index],
        block_offsets=offsets,
    )
    return clipped.noting(
        step="clip_lengths", max_prompt_tokens=max_prompt_tokens, max_output_tokens=max_output_tokens
    )


def drop_longer(trace: Trace, max_tokens: int) -> Trace:
    """Without the requests whose prompt and reply exceed a context of `max_tokens`: a server would refuse them."""
    fits = trace.prompt_tokens + trace.output_tokens <= max_tokens
    if not fits.any():
        raise TraceError(f"max_tokens={max_tokens!r} is invalid: no request is that short")
    dropped = int(np.count_nonzero(~fits))
    return trace.select(fits).noting(step="drop_longer", max_tokens=max_tokens, dropped=dropped)


def shrink(trace: Trace, divisor: int) -> Trace:
    """All lengths and the block size divided by `divisor`, a divisor of the block size: the same blocks and times.

    For engines much smaller than the recorded one.
    """
    if divisor < 1 or trace.block_size % divisor:
        raise TraceError(f"divisor={divisor!r} is invalid: expected a divisor of {trace.block_size}")
    small = trace.replace(
        prompt_tokens=np.maximum(1, trace.prompt_tokens // divisor),
        output_tokens=-(-trace.output_tokens // divisor),
        block_size=trace.block_size // divisor,
    )
    return small.noting(step="shrink", divisor=divisor)


# ---------------------------------------------------------------------- parts
def session_starts(trace: Trace) -> tuple[Floats, Ints]:
    """First arrival of each session, and for each request the place of its session in there."""
    _, index = np.unique(trace.session, return_inverse=True)
    first = np.full(index.max(initial=-1) + 1, np.inf)
    np.minimum.at(first, index, trace.arrival_seconds)
    return first, index


def _delayed(trace: Trace, rng: np.random.Generator, jitter_seconds: float) -> Trace:
    """Every session some time later."""
    first, index = session_starts(trace)
    shift = rng.uniform(0, jitter_seconds, len(first))
    return trace.replace(arrival_seconds=trace.arrival_seconds + shift[index])


def _renamed(trace: Trace, copy: int, shared: NDArray[np.bool_], num_sessions: int) -> Trace:
    """The sessions and private blocks of a copy; ids are dense, one per entry of `shared`."""
    ids = trace.block_ids
    return trace.replace(
        block_ids=np.where(shared[ids], ids, ids + copy * len(shared)),
        session=trace.session + copy * num_sessions,
    )


def shared_blocks(trace: Trace, num_ids: int) -> NDArray[np.bool_]:
    """Whether requests of more than one session have a block; ids are dense."""
    session = np.repeat(trace.session, trace.num_full_blocks)
    one_of = np.empty(num_ids, dtype=np.int64)
    one_of[trace.block_ids] = session  # any of them
    shared = np.zeros(num_ids, dtype=bool)
    shared[trace.block_ids[one_of[trace.block_ids] != session]] = True
    return shared


def _apart(traces: Sequence[Trace]) -> list[Trace]:
    """The traces with ids, sessions and tenants of their own."""
    parts, num_ids, num_sessions, num_tenants = [], 0, 0, 0
    for trace in traces:
        dense, bound = densify(trace.block_ids)
        _, session = np.unique(trace.session, return_inverse=True)
        _, tenant = np.unique(trace.tenant, return_inverse=True)
        parts.append(
            trace.replace(
                block_ids=dense + num_ids, session=session + num_sessions, tenant=tenant + num_tenants
            )
        )
        num_ids += bound
        num_sessions += int(session.max(initial=-1)) + 1
        num_tenants += int(tenant.max(initial=-1)) + 1
    return parts


def _join(traces: Sequence[Trace]) -> Trace:
    """All requests in order of arrival; ids, sessions and tenants as they are."""
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(trace, name) for trace in traces]) for name in ROW_COLUMNS
    }
    order = np.argsort(columns["arrival_seconds"], kind="stable")
    offsets = offsets_of(np.concatenate([trace.num_full_blocks for trace in traces]))
    ids = np.concatenate([trace.block_ids for trace in traces])
    ids, offsets = take_ragged(ids, offsets, order)
    return Trace(
        **{name: column[order] for name, column in columns.items()},
        block_ids=ids,
        block_offsets=offsets,
        block_size=traces[0].block_size,
    )


def _check_block_sizes(traces: Sequence[Trace]) -> None:
    if not traces:
        raise TraceError("no trace to compose")
    sizes = sorted({trace.block_size for trace in traces})
    if len(sizes) > 1:
        raise TraceError(f"block_size differs: {sizes}; re-block the sources to a common size first")
