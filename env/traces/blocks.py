"""Ids of blocks, prompt after prompt: a flat array, and the offsets of its rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer[Any]]
Floats = NDArray[np.floating[Any]]


def densify(ids: Ints) -> tuple[Ints, int]:
    """Ids as numbers below the returned bound, equal where the ids are equal; as they are if small enough."""
    if not len(ids):
        return ids, 0
    highest = int(ids.max())
    if highest < 4 * len(ids) + 1024:
        return ids, highest + 1
    values, dense = np.unique(ids, return_inverse=True)
    return dense.astype(np.int64), len(values)


def take_ragged(values: Ints, offsets: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """Values and offsets of the chosen rows of a ragged array."""
    counts = np.diff(offsets)[rows]
    new_offsets = offsets_of(counts)
    index = np.arange(new_offsets[-1]) + np.repeat(offsets[rows] - new_offsets[:-1], counts)
    return values[index], new_offsets


def offsets_of(counts: Sequence[int] | Ints) -> Ints:
    """Offsets of rows with so many values each."""
    return np.concatenate([[0], np.cumsum(np.asarray(counts, dtype=np.int64))]).astype(np.int64)


def wrong_links(block_ids: Ints, block_offsets: Ints) -> NDArray[np.bool_]:
    """Where an id has another predecessor than at its first occurrence."""
    dense, num = densify(block_ids)
    if not num:
        return np.zeros(0, dtype=bool)
    parents = np.empty_like(dense)
    parents[1:] = dense[:-1]
    starts = block_offsets[:-1]
    parents[starts[starts < block_offsets[1:]]] = -1
    parent_of = np.empty(num, dtype=np.int64)
    parent_of[dense[::-1]] = parents[::-1]  # the first one stays
    return parent_of[dense] != parents
