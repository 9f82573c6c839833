"""The same traffic in blocks of another size."""

import numpy as np

from kvpilot.env.traces.blocks import Ints, densify, offsets_of
from kvpilot.env.traces.trace import Trace, TraceError


def reblock(trace: Trace, block_size: int) -> Trace:
    """See `Trace.with_block_size`."""
    old = trace.block_size
    if block_size == old:
        return trace
    if block_size < 1 or (old % block_size and block_size % old):
        raise TraceError(f"block_size={block_size} is invalid: expected a divisor or a multiple of {old}")
    ids, offsets = _coarser(trace, block_size) if block_size > old else _finer(trace, block_size)
    return trace.replace(
        block_ids=ids,
        block_offsets=offsets,
        block_size=block_size,
        provenance=(*trace.provenance, {"step": "with_block_size", "block_size": block_size}),
    )


def _coarser(trace: Trace, block_size: int) -> tuple[Ints, Ints]:
    """A group has the id of its last block, which stands for everything up to there."""
    group = block_size // trace.block_size
    counts = trace.num_full_blocks // group
    offsets = offsets_of(counts)
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
    return trace.block_ids[np.repeat(trace.block_offsets[:-1], counts) + within * group + group - 1], offsets


def _finer(trace: Trace, block_size: int) -> tuple[Ints, Ints]:
    """Part s of block b is b * parts + s. The parts of a partial last block belong to the block that it becomes."""
    parts = trace.block_size // block_size
    dense, num_ids = densify(trace.block_ids)
    counts = trace.prompt_tokens // block_size
    offsets = offsets_of(counts)
    block_of = _blocks_with_tail(trace, dense, num_ids)
    coarse_counts = trace.num_full_blocks + 1
    coarse_offsets = offsets_of(coarse_counts)
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
    coarse = block_of[np.repeat(coarse_offsets[:-1], counts) + within // parts]
    return coarse * parts + within % parts, offsets


def _blocks_with_tail(trace: Trace, dense: Ints, num_ids: int) -> Ints:
    """Each request's blocks and one more: the block that holds its partial end."""
    num = len(trace)
    tails = num_ids + np.arange(num)  # new ones
    successor = trace.successor
    rows = np.flatnonzero(successor >= 0)
    tails[rows] = dense[trace.block_offsets[successor[rows]] + trace.num_full_blocks[rows]]
    return np.insert(dense, trace.block_offsets[1:], tails)
