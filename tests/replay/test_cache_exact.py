"""Pool and prefix cache alone against a count that shares nothing with them: sorted lists, no pages, no queues."""

import os
from bisect import bisect_right
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvpilot.engine.config import Knobs
from kvpilot.engine.kv.cache import KVCache
from kvpilot.engine.kv.eviction import LruPolicy
from kvpilot.engine.kv.formats import PageShape
from kvpilot.engine.kv.pool import KVPool
from kvpilot.engine.kv.storage import NoStorage
from kvpilot.engine.stats import StatsRecorder
from kvpilot.env.simulator.belady import BeladyPolicy
from kvpilot.env.traces.readers import read_trace
from kvpilot.env.traces.reuse import find_runs, lru_hits
from kvpilot.env.traces.trace import Trace

TRACES = os.environ.get("KVPILOT_TRACES")


def make_trace(chains: list[list[int]]) -> Trace:
    ones = np.ones(len(chains), dtype=np.int64)
    return Trace(
        arrival_seconds=np.arange(len(chains), dtype=float),
        prompt_tokens=np.array([len(chain) + 1 for chain in chains]) * 4 - 3,
        output_tokens=ones,
        block_ids=np.array([block for chain in chains for block in chain], dtype=np.int64),
        block_offsets=np.array([0, *accumulate(map(len, chains))]),
        block_size=4,
        session=ones,
        turn=ones.astype(np.int32),
        tenant=ones,
    )


class CacheCount(NamedTuple):
    """Full prompt blocks looked up and found; requests larger than the cache are looked up and not kept."""

    queries: int
    hits: int
    too_large: int


def count_hits(trace: Trace, num_pages: int, eviction: str = "lru") -> CacheCount:
    """Requests one after another, no time, no batching: each finds the longest cached prefix of its full blocks, and
    leaves all of them cached in `num_pages` pages of one block each, at one precision. Replies are not cached."""
    shape = PageShape(num_layers=1, num_kv_heads=1, head_dim=2, page_size=2)
    pool_bytes = num_pages * shape.num_values * 2
    pool = KVPool(shape=shape, ladder=("bf16",), pool_bytes=pool_bytes, storage=NoStorage())
    fits = trace.select(np.diff(trace.block_offsets) <= num_pages)
    policy = BeladyPolicy(fits) if eviction == "belady" else LruPolicy()
    cache = KVCache(pool, policy, Knobs(), StatsRecorder())
    queries = hits = too_large = 0
    for row in range(len(trace)):
        blocks: list[int] = trace.blocks_of(row).tolist()
        now = float(row)
        pages = cache.match(blocks.__getitem__, len(blocks))
        queries, hits = queries + len(blocks), hits + len(pages)
        if len(blocks) > num_pages:
            too_large += 1
            continue
        cache.policy.request_arrived(blocks.__getitem__, len(blocks), now)
        cache.acquire(pages, now)
        num_cached = len(pages)
        assert cache.reclaim(len(blocks) - num_cached, now)
        pages += cache.allocate(len(blocks) - num_cached)
        for index in range(num_cached, len(blocks)):
            cache.seal(pages, index, blocks[index])
        cache.release(pages, len(pages), now)
    cache.check_integrity()
    return CacheCount(queries, hits, too_large)


def brute_force(trace: Trace, capacity: int, clairvoyant: bool) -> tuple[int, int]:
    """(queries, hits): a dict of cached blocks, and for every eviction a search through all of them."""
    chains = [trace.blocks_of(row).tolist() for row in range(len(trace))]
    uses: dict[int, list[int]] = {}
    for row, chain in enumerate(chains):
        for block in chain if len(chain) <= capacity else ():  # what is not kept is no reason to keep others
            uses.setdefault(block, []).append(row)
    cached: dict[int, tuple[int, int]] = {}  # block -> (row of last use, depth)
    queries = hits = 0
    for row, chain in enumerate(chains):
        queries += len(chain)
        found = next((k for k, block in enumerate(chain) if block not in cached), len(chain))
        hits += found
        if len(chain) > capacity:
            continue

        def next_use(block: int, row: int = row) -> float:
            later = bisect_right(uses[block], row)
            return uses[block][later] if later < len(uses[block]) else inf

        kept = set(chain[:found])
        spare = capacity - len(cached)
        others = [block for block in cached if block not in kept]
        if clairvoyant:  # used again last, and of those the deepest: a parent serves without its child
            others.sort(key=lambda block: (-next_use(block), -cached[block][1]))
        else:
            others.sort(key=lambda block: (cached[block][0], -cached[block][1]))
        for block in others[: max(len(chain) - found - spare, 0)]:
            del cached[block]
        for depth, block in enumerate(chain):
            cached[block] = (row, depth)
    return queries, hits


@st.composite
def chained_prompts(draw: st.DrawFn) -> list[list[int]]:
    """Prompts as paths from the root of a random tree of blocks."""
    parents = draw(st.lists(st.integers(-1, 30), min_size=1, max_size=30))
    paths: list[list[int]] = []
    for block, parent in enumerate(parents):
        paths.append([*(paths[parent % block] if parent >= 0 and block else []), block])
    return draw(st.lists(st.sampled_from([[], *paths]), min_size=1, max_size=40))


@settings(max_examples=300, deadline=None)
@example(chains=[[0, 1], [0, 3, 11], [0, 3, 11, 13, 15], [0, 2], [0, 1]], capacity=4, eviction="belady")
@given(chains=chained_prompts(), capacity=st.integers(2, 20), eviction=st.sampled_from(["lru", "belady"]))
def test_hits_equal_a_brute_force_count_on_random_prompts(chains, capacity, eviction):
    trace = make_trace(chains)
    count = count_hits(trace, capacity, eviction)
    assert (count.queries, count.hits) == brute_force(trace, capacity, eviction == "belady")


def test_belady_keeps_what_comes_back():
    trace = make_trace([[0, 1], [2, 3], [0, 1], [4, 5], [0, 1]])
    assert count_hits(trace, 3, "lru").hits == 1 + 1
    assert count_hits(trace, 3, "belady").hits == 1 + 1
    assert count_hits(trace, 4, "lru").hits == 4
    assert count_hits(make_trace([[0, 1], [2, 3], [4, 5], [0, 1]]), 4, "lru").hits == 0
    assert count_hits(make_trace([[0, 1], [2, 3], [4, 5], [0, 1]]), 4, "belady").hits == 2


def test_a_prompt_larger_than_the_cache_is_looked_up_and_not_kept():
    count = count_hits(make_trace([[0, 1], [0, 1, 2, 3], [0, 1]]), 3)
    assert (count.queries, count.hits, count.too_large) == (8, 4, 1)


@pytest.mark.skipif(not TRACES, reason="KVPILOT_TRACES names no folder of traces")
@pytest.mark.parametrize("num_pages", [2000, 5000])
@pytest.mark.parametrize("eviction", ["lru", "belady"])
def test_hits_equal_a_brute_force_count_on_recorded_conversations(num_pages, eviction):
    trace = read_trace(Path(TRACES or "") / "mooncake/conversation_first40min.jsonl")[:5000]
    count = count_hits(trace, num_pages, eviction)
    assert (count.queries, count.hits) == brute_force(trace, num_pages, eviction == "belady")
    if eviction == "lru":  # and a third way to count: stack distances
        assert count.hits == lru_hits(trace, find_runs(trace))[num_pages]
