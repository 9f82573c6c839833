"""Against caches that do it block by block."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot.env.traces.readers import read_trace
from kvpilot.env.traces.reuse import (
    find_runs,
    hit_rate_curve,
    infinite_hit_rate,
    lru_hits,
    optimal_hits,
    reuse_interval_seconds,
)

NEVER = 1 << 60


def chains_of(trace):
    return [trace.blocks_of(i).tolist() for i in range(len(trace))]


def lru(chains, size: int) -> int:
    """Blocks in order of use, the oldest first; a prompt is looked up whole, then becomes the newest."""
    cached: list[int] = []
    hits = 0
    for chain in chains:
        for block in chain:
            if block not in cached:
                break
            hits += 1
        cached = [block for block in cached if block not in chain] + chain[::-1]
        cached = cached[-size:]
    return hits


def optimal(chains, size: int) -> int:
    """Keeps what is used soonest, of that the blocks nearest to the start."""
    cached: set[int] = set()
    hits = 0
    for i, chain in enumerate(chains):
        for block in chain:
            if block not in cached:
                break
            hits += 1
        cached |= set(chain)

        def next_use(block, after=i):
            return next((j for j in range(after + 1, len(chains)) if block in chains[j]), NEVER)

        depth = {block: k for other in chains for k, block in enumerate(other)}
        keep = sorted(cached, key=lambda block: (next_use(block), depth[block]))
        cached = {block for block in keep[:size] if next_use(block) < NEVER}
    return hits


def best_of_all(chains, size: int) -> int:
    """Exhaustive: every set of blocks that could be kept after each request."""
    from itertools import combinations

    reachable = {frozenset(): 0}
    for chain in chains:
        following: dict[frozenset, int] = {}
        for cached, hits in reachable.items():
            for block in chain:
                if block not in cached:
                    break
                hits += 1
            pool = cached | set(chain)
            for kept in combinations(sorted(pool), min(size, len(pool))):
                key = frozenset(kept)
                following[key] = max(following.get(key, 0), hits)
        reachable = following
    return max(reachable.values())


@given(seed=st.integers(0, 10_000), block_size=st.sampled_from([2, 4, 8]), preamble=st.sampled_from([0, 8]))
def test_lru_at_every_size_at_once(talk, seed, block_size, preamble):
    trace = talk(seed, preamble=preamble).trace(block_size)
    hits = lru_hits(trace, find_runs(trace))
    chains = chains_of(trace)
    for size in (1, 2, 3, 7, 20, 50, 200, 1000):
        assert hits[min(size, len(hits) - 1)] == lru(chains, size)
    assert hits[0] == 0


@given(seed=st.integers(0, 10_000), block_size=st.sampled_from([4, 8]))
def test_optimal_is_belady(talk, seed, block_size):
    trace = talk(seed).trace(block_size)
    runs, chains = find_runs(trace), chains_of(trace)
    for size in (1, 3, 10, 40):
        assert optimal_hits(trace, runs, size) == optimal(chains, size)


@given(seed=st.integers(0, 10_000))
def test_nothing_hits_more_than_optimal(talk, seed):
    trace = talk(seed, num_sessions=2, max_turns=3).trace(16)
    runs = find_runs(trace)
    for size in (1, 2, 3):
        assert optimal_hits(trace, runs, size) == best_of_all(chains_of(trace), size)


@given(seed=st.integers(0, 10_000))
def test_infinite_cache_and_intervals(talk, seed):
    trace = talk(seed).trace(4)
    seen: dict[int, float] = {}
    intervals = []
    for i, chain in enumerate(chains_of(trace)):
        now = float(trace.arrival_seconds[i])
        intervals += [now - seen[block] for block in chain if block in seen]
        seen |= dict.fromkeys(chain, now)
    runs = find_runs(trace)
    assert infinite_hit_rate(trace, runs) == pytest.approx(len(intervals) / len(trace.block_ids))
    seconds, counts = reuse_interval_seconds(trace, runs)
    assert np.sort(np.repeat(seconds, counts)) == pytest.approx(sorted(intervals))


def test_the_curve_ends_where_everything_is_hit(talk):
    trace = talk(1).trace(2)
    runs = find_runs(trace)
    curve = hit_rate_curve(trace, runs)
    assert curve.lru == sorted(curve.lru)
    assert all(best >= lru for best, lru in zip(curve.optimal, curve.lru, strict=True))
    assert curve.lru[-1] == curve.optimal[-1] == infinite_hit_rate(trace, runs)


def test_no_reuse_at_all(data):
    trace = read_trace(data / "azure.csv")
    curve = hit_rate_curve(trace, find_runs(trace), [1, 100])
    assert curve == ([1, 100], [0.0, 0.0], [0.0, 0.0])


def test_recorded_conversations_give_the_known_rates(real_traces):
    """Whole blocks only, in three decimals: `autotune trace info conversation_first40min.jsonl --sizes 2000,5000`."""
    trace = read_trace(real_traces / "mooncake" / "conversation_first40min.jsonl")
    runs = find_runs(trace)
    curve = hit_rate_curve(trace, runs, [2000, 5000])
    assert infinite_hit_rate(trace, runs) == pytest.approx(0.365, abs=5e-4)
    assert curve.lru == pytest.approx([0.058, 0.124], abs=5e-4)
    assert curve.optimal == pytest.approx([0.261, 0.347], abs=5e-4)
