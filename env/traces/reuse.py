"""How much a prefix cache of any size can hit: LRU by stack distances, the clairvoyant optimum by next use.

The model is a cache of whole blocks and nothing else: a request looks up its prompt, hits the leading blocks that
are cached, and leaves all of them cached, most recently used first to last. A chain is used from its start, so an
ancestor is never older than its descendants, and blocks last used by one request and next used by another form a
*run* of consecutive blocks. Runs are few (one to three per request) where blocks are millions; all figures come
from them. Replies are not counted: a reply shows up when the next prompt repeats it.
"""

import heapq
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpilot.env.traces.blocks import Ints, densify
from kvpilot.env.traces.trace import Trace

Progress = Callable[[int, int], None]  # done, total


class ReuseRuns(NamedTuple):
    """Prompt `consumer` finds its blocks [start, stop) as prompt `producer` left them; by consumer, then start."""

    producer: Ints
    consumer: Ints
    start: Ints
    stop: Ints

    @property
    def num_blocks(self) -> Ints:
        return self.stop - self.start


def find_runs(trace: Trace, progress: Progress | None = None) -> ReuseRuns:
    """All reuse of blocks in the trace, by request."""
    dense, num_ids = densify(trace.block_ids)
    offsets = trace.block_offsets
    last_user = np.full(num_ids, -1, dtype=np.int64)
    columns: list[NDArray[np.int64]] = []
    for i in range(len(trace)):
        chain = dense[offsets[i] : offsets[i + 1]]
        users = last_user[chain]
        last_user[chain] = i
        known = int(np.count_nonzero(users >= 0))  # a prefix
        if known:
            users = users[:known]
            starts = np.concatenate([[0], np.flatnonzero(np.diff(users)) + 1])
            stops = np.append(starts[1:], known)
            columns.append(np.stack([users[starts], np.full(len(starts), i), starts, stops]))
        if progress is not None and i % 256 == 0:
            progress(i, len(trace))
    return ReuseRuns(*np.concatenate(columns, axis=1)) if columns else ReuseRuns(*np.empty((4, 0), np.int64))


def infinite_hit_rate(trace: Trace, runs: ReuseRuns) -> float:
    """Share of full prompt blocks that some earlier prompt had."""
    return float(runs.num_blocks.sum()) / max(len(trace.block_ids), 1)


def reuse_interval_seconds(trace: Trace, runs: ReuseRuns) -> tuple[NDArray[np.float64], Ints]:
    """Seconds from use to next use, and how many blocks each holds for."""
    return trace.arrival_seconds[runs.consumer] - trace.arrival_seconds[runs.producer], runs.num_blocks


def lru_hits(trace: Trace, runs: ReuseRuns) -> Ints:
    """i8[max + 1]: blocks hit by an LRU cache of 0, 1, 2 ... blocks (Mattson et al., 1970), in one pass.

    A block of a run is at depth (blocks last used by later requests) + (its place in the run). The first term
    is a suffix sum over requests, kept in a Fenwick tree.
    """
    live = _Fenwick(len(trace))  # blocks whose last user is a request
    firsts, lengths = np.empty_like(runs.start), runs.num_blocks
    first_of = np.searchsorted(runs.consumer, np.arange(len(trace) + 1))
    counts = trace.num_full_blocks.tolist()
    producer, length = runs.producer.tolist(), lengths.tolist()
    for i in range(len(trace)):
        mine = range(int(first_of[i]), int(first_of[i + 1]))
        for r in mine:
            firsts[r] = live.total - live.prefix_sum(producer[r] + 1) + 1
        for r in mine:
            live.add(producer[r], -length[r])
        live.add(i, counts[i])
    num_slots = int((firsts + lengths).max()) if len(firsts) else 1
    steps = np.zeros(num_slots + 1, dtype=np.int64)
    np.add.at(steps, firsts, 1)
    np.add.at(steps, firsts + lengths, -1)
    return np.cumsum(np.cumsum(steps))[:-1]  # hits at exactly this depth, then at most this depth


def optimal_hits(trace: Trace, runs: ReuseRuns, num_blocks: int) -> int:
    """Blocks hit by a cache of `num_blocks` that knows the future (Belady, 1966): it keeps what is used soonest.

    Among blocks of the same next use the deepest goes first: without its ancestors a block cannot be hit.
    """
    order = np.argsort(runs.producer, kind="stable")
    first_of = np.searchsorted(runs.producer[order], np.arange(len(trace) + 1)).tolist()
    consumer, start, length = (c[order].tolist() for c in (runs.consumer, runs.start, runs.num_blocks))
    kept = [0] * len(order)  # leading blocks of each run still cached
    due: dict[int, list[int]] = {}  # next user -> runs
    farthest: list[tuple[int, int, int]] = []  # (-next user, -start, run)
    used = hits = 0
    for i in range(len(trace)):
        for run in due.pop(i, ()):
            hits += kept[run]
            used -= kept[run]
            kept[run] = 0
        for run in range(first_of[i], first_of[i + 1]):
            kept[run] = length[run]
            used += length[run]
            due.setdefault(consumer[run], []).append(run)
            heapq.heappush(farthest, (-consumer[run], -start[run], run))
        while used > num_blocks:
            run = farthest[0][2]
            excess = min(used - num_blocks, kept[run])
            kept[run] -= excess
            used -= excess
            if not kept[run]:
                heapq.heappop(farthest)
    return hits


class HitRateCurve(NamedTuple):
    num_blocks: list[int]
    lru: list[float]
    optimal: list[float]


def hit_rate_curve(
    trace: Trace, runs: ReuseRuns, sizes: list[int] | None = None, progress: Progress | None = None
) -> HitRateCurve:
    """Block hit rates over cache sizes; by default powers of two up to where LRU hits all that can be hit."""
    hits = lru_hits(trace, runs)
    if sizes is None:
        sizes = [1 << k for k in range(4, max(len(hits) - 1, 16).bit_length() + 1)]
    total = max(len(trace.block_ids), 1)
    optimal = []
    for k, size in enumerate(sizes):
        optimal.append(optimal_hits(trace, runs, size) / total)
        if progress is not None:
            progress(k + 1, len(sizes))
    lru = [int(hits[min(size, len(hits) - 1)]) / total for size in sizes]
    return HitRateCurve(list(sizes), lru, optimal)


class _Fenwick:
    """Prefix sums of integers under updates (Fenwick, 1994)."""

    def __init__(self, num: int) -> None:
        self._tree = [0] * (num + 1)
        self.total = 0

    def add(self, index: int, value: int) -> None:
        self.total += value
        index += 1
        while index < len(self._tree):
            self._tree[index] += value
            index += index & -index

    def prefix_sum(self, stop: int) -> int:
        """Of the values before `stop`."""
        total = 0
        while stop > 0:
            total += self._tree[stop]
            stop -= stop & -stop
        return total
