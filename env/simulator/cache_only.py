"""The pool and the prefix cache alone: requests one after another, no time, no batching."""

from collections.abc import Callable
from typing import NamedTuple

from kvpilot.engine.config import Knobs
from kvpilot.engine.errors import ConfigError
from kvpilot.engine.kv.cache import KVCache
from kvpilot.engine.kv.eviction import POLICIES, EvictionPolicy
from kvpilot.engine.kv.formats import PageShape
from kvpilot.engine.kv.pool import KVPool
from kvpilot.engine.kv.storage import NoStorage
from kvpilot.engine.stats import StatsRecorder
from kvpilot.env.simulator.belady import BeladyPolicy
from kvpilot.env.traces.trace import Trace

EXACT = ("bf16",)


class CacheCount(NamedTuple):
    """Full prompt blocks looked up and found; requests larger than the cache are looked up and not kept."""

    queries: int
    hits: int
    too_large: int

    @property
    def hit_rate(self) -> float:
        return self.hits / self.queries if self.queries else 0.0


def count_hits(
    trace: Trace, num_pages: int, eviction: str = "lru", progress: Callable[[int, int], None] | None = None
) -> CacheCount:
    """Each request finds the longest cached prefix of its full blocks, and leaves all of them cached.

    `num_pages` pages of one block each, at one precision. Replies are not cached: a reply shows up when the next
    prompt repeats it.
    """
    cache = _cache(num_pages, _policy(trace, eviction))
    queries = hits = too_large = 0
    for row in range(len(trace)):
        blocks: list[int] = trace.blocks_of(row).tolist()
        if progress is not None:
            progress(row + 1, len(trace))
        now = float(row)
        pages = cache.match(blocks.__getitem__, len(blocks))
        queries, hits = queries + len(blocks), hits + len(pages)
        cache.policy.request_arrived(blocks.__getitem__, len(blocks), now)
        if len(blocks) > num_pages:
            too_large += 1
            continue
        cache.acquire(pages, now)
        num_new = len(blocks) - len(pages)
        made_room = cache.reclaim(num_new, now)
        assert made_room, "idle pages could not be released"
        num_cached = len(pages)
        pages += cache.allocate(num_new)
        for index in range(num_cached, len(blocks)):
            cache.seal(pages, index, blocks[index])
        cache.release(pages, len(pages), now)
    cache.check_integrity()
    return CacheCount(queries, hits, too_large)


def _policy(trace: Trace, eviction: str) -> EvictionPolicy:
    if eviction == "belady":
        return BeladyPolicy(trace)
    if eviction not in POLICIES:
        raise ConfigError(f"eviction={eviction!r} is invalid: expected belady, {', '.join(POLICIES)}")
    return POLICIES[eviction]()


def _cache(num_pages: int, policy: EvictionPolicy) -> KVCache:
    shape = PageShape(num_layers=1, num_kv_heads=1, head_dim=2, page_size=2)
    pool_bytes = num_pages * shape.num_values * 2
    pool = KVPool(shape=shape, ladder=EXACT, pool_bytes=pool_bytes, storage=NoStorage())
    return KVCache(pool, policy, Knobs(), StatsRecorder())
