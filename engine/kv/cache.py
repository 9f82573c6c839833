"""Prefix cache and reclaim: what happens to a page once it is sealed (which idle pages are retained: see idle.py).

`open -> sealed -> (last user ends) retained -> (idle > ttl, or above budget) unprotected -> stepped down, rung by
rung -> released`. Memory is taken in this order: free slots (after compaction); idle pages stepped down as far as
`kv_level` allows, unprotected before retained; unprotected pages released; then, for running requests and the
exceptions named in `Take`, retained pages released; for running requests at last their own sealed pages
stepped down.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from enum import StrEnum
from itertools import groupby
from typing import ClassVar

from kvpilot.engine.compiled import mypyc_attr
from kvpilot.engine.config import Knobs
from kvpilot.engine.errors import PoolIntegrityError
from kvpilot.engine.kv.eviction import EvictionPolicy
from kvpilot.engine.kv.idle import IDLE_STATES, IdlePages
from kvpilot.engine.kv.page import LIVE, RETAINED, UNPROTECTED, Page, PageState
from kvpilot.engine.kv.pool import KVPool
from kvpilot.engine.stats import StatsRecorder

STATE_LABELS = tuple(state.name.lower() for state in PageState)


class Take(StrEnum):
    """Why retained pages may be released."""

    IDLE_ENGINE = "idle_engine"  # nothing is running
    GROWTH = "growth"  # a running request needs its next page
    STARVING = "starving"  # a request has waited longer than starvation_seconds


@mypyc_attr(allow_interpreted_subclasses=True)
class KVCache:
    """Owns which sealed pages can be found, and in which order memory is taken."""

    idle_class: ClassVar[type[IdlePages]] = IdlePages  # a subclass may name its own

    def __init__(
        self, pool: KVPool, policy: EvictionPolicy, knobs: Knobs, stats: StatsRecorder, *, tail_pages: int = 0
    ) -> None:
        self.pool = pool
        self.policy = policy
        self.knobs = knobs
        self._stats = stats
        self._tail_pages = tail_pages  # sealed pages per running request that keep 8 bits
        self._by_hash: dict[Hashable, Page] = {}
        self.idle = self.idle_class(pool, policy, knobs, stats)
        # oldest first; without those that a request's `max_kv_level` keeps at their level, however many they are
        self._live_sealed: list[OrderedDict[Page, None]] = [OrderedDict() for _ in pool.ladder]

    def set_knobs(self, knobs: Knobs, now: float) -> None:
        self.knobs = knobs
        self.idle.set_knobs(knobs, now)

    # ------------------------------------------------------------------ lookup
    def match(
        self, block_hash: Callable[[int], Hashable], max_pages: int, max_level: int | None = None
    ) -> list[Page]:
        """The cached pages of the longest known prefix, at most `max_pages`. Changes nothing.

        The prefix ends before the first page that is coarser than `max_level`.
        """
        pages: list[Page] = []
        for index in range(max_pages):
            page = self._by_hash.get(block_hash(index))
            if page is None or (max_level is not None and page.level > max_level):
                break
            pages.append(page)
        return pages

    def has(self, block: Hashable, max_level: int | None = None) -> bool:
        """The page is cached, and no coarser than `max_level`."""
        if max_level is None:
            return block in self._by_hash
        page = self._by_hash.get(block)
        return page is not None and page.level <= max_level

    # ------------------------------------------------------------------ users of pages
    def acquire(self, pages: list[Page], now: float) -> None:
        """One more user for each of these cached pages, the leading pages of a sequence."""
        idle = [page for page in pages if page.refs == 0]
        for last_use, group in groupby(page.last_use for page in idle):
            self._stats.observe("page_reuse_gap_seconds", now - last_use, sum(1 for _ in group))
        for page in idle:
            self.idle.remove(page)
            self.pool.set_state(page, LIVE)
            self._live_sealed[page.level][page] = None
        for page in pages:
            page.refs += 1
        for page in self.tail(pages, len(pages)):
            page.guards += 1

    def allocate(self, num_pages: int) -> list[Page]:
        """Open pages for a running request; the caller has made room."""
        self._stats.add("pages_allocated", num_pages)
        return [self.pool.allocate() for _ in range(num_pages)]

    def limit(self, pages: list[Page], max_level: int) -> None:
        """A user of these pages, none of them coarser, keeps them from becoming coarser until `unlimit`."""
        for page in pages:
            assert page.level <= max_level
            could_step_down = page.is_sealed and page.level < page.max_level
            page.add_limit(max_level)
            if could_step_down and page.level == page.max_level:
                del self._live_sealed[page.level][page]

    def unlimit(self, pages: list[Page], max_level: int) -> None:
        """Undoes `limit`; before that user's `release`."""
        for page in pages:
            was_kept = page.is_sealed and page.level == page.max_level
            page.remove_limit(max_level)
            if was_kept and page.level < page.max_level:
                self._live_sealed[page.level][page] = None

    def seal(self, pages: list[Page], index: int, block: Hashable) -> None:
        """Page `index` of a running sequence is full and becomes findable.

        It replaces an idle page of the same content, which may have been stepped down; beside one in use it
        stays private, unless that one is too coarse for the request: then that one becomes private.
        """
        page = pages[index]
        self.pool.seal(page, is_sink=index == 0)
        if page.max_level > 0:
            self._live_sealed[0][page] = None
        twin = self._by_hash.get(block)
        if twin is not None and twin.refs > 0 and twin.level > page.max_level:
            twin.hash = None
            twin = None
        if twin is not None and twin.refs == 0:
            self._drop(twin)
        if twin is None or twin.refs == 0:
            page.hash = block
            self._by_hash[block] = page
        if self._tail_pages:
            page.guards += 1
            if index >= self._tail_pages:
                pages[index - self._tail_pages].guards -= 1

    def release(
        self, pages: list[Page], num_sealed: int, now: float, *, turn: int = 1, num_prompt_tokens: int = 0
    ) -> None:
        """The user of these pages ends. Sealed, findable pages become idle; the others are free."""
        for page in self.tail(pages, num_sealed):
            page.guards -= 1
        leaf_seen = False
        for page in reversed(pages):  # a leaf goes before its parents
            page.refs -= 1
            page.turn, page.num_prompt_tokens = turn, num_prompt_tokens
            if page.refs > 0:
                continue
            if page.is_sealed:
                del self._live_sealed[page.level][page]
            if page.hash is None:
                self.pool.free(page)
                continue
            page.last_use = now
            if not leaf_seen:
                self.policy.request_ended(page, now)
                leaf_seen = True
            self.idle.add(page)
        self.idle.shrink_to_budget(now)

    def tail(self, pages: list[Page], num_sealed: int) -> list[Page]:
        """The sealed pages of a running sequence that keep 8 bits because its last tokens are in them."""
        return pages[max(num_sealed - self._tail_pages, 0) : num_sealed]

    # ------------------------------------------------------------------ memory
    def obtainable_slots(self, matched: list[Page], *, with_retained: bool) -> int:
        """Full-precision pages that `reclaim` could make room for while `matched` pages are kept.

        Without `with_retained` (a waiting request) retained pages count as occupied, at the lowest level that
        `kv_level` allows them.
        """
        pool = self.pool
        level_limit = self.knobs.kv_level
        pages = [sum(pool.counts[LIVE][level]) for level in range(len(pool.ladder))]
        retained = [list(row) for row in pool.counts[RETAINED]]
        for page in matched:
            if page.refs == 0:
                pages[page.level] += 1
                if page.state is RETAINED:
                    retained[page.level][page.is_sink] -= 1
        if not with_retained:
            for level, row in enumerate(retained):
                for is_sink, count in enumerate(row):
                    floor = pool.guard_level if is_sink else pool.last_level
                    pages[max(level, min(level_limit, floor))] += count
        return pool.num_slots - pool.slots_for(pages)

    def reclaim(self, num_slots: int, now: float, take: Take | None = None) -> bool:
        """Make room for `num_slots` open pages in the order of the module's docstring; False if that fails."""
        pool = self.pool
        while pool.available_slots < num_slots:
            if pool.compact() or self._step_down_idle(now) or self._release_one(UNPROTECTED, now):
                continue
            if take is None:
                return False
            if self._release_one(RETAINED, now):
                self._stats.add("retained_taken", 1, take)
            elif take != Take.GROWTH or not self._step_down_live():
                return False
        return True

    def reclaim_in_background(self, reserve_slots: int, now: float, max_pages: int = 8) -> bool:
        """Towards a reserve of free slots, by the same order as for a waiting request, a few pages at a time.

        True if there may be more to do.
        """
        for _ in range(max_pages):
            if self.pool.available_slots >= reserve_slots:
                return False
            if not (self.pool.compact() or self._step_down_idle(now) or self._release_one(UNPROTECTED, now)):
                return False
        return True

    def _step_down_idle(self, now: float) -> bool:
        """The least valuable idle page one rung down: unprotected before retained, high levels before low ones."""
        for state in IDLE_STATES:
            for level in range(self.knobs.kv_level):
                page = self.idle.to_step_down(state, level, now)
                if page is not None and self.pool.has_cells(level + 1):
                    self._step_down_queued(page, now)
                    return True
        return False

    def _step_down_queued(self, page: Page, now: float) -> None:
        self.idle.remove(page)
        self._step_down(page)
        self.idle.put_back(page)
        if page.hash is None:  # could not be encoded and serves nobody any more
            self._release(page, now)

    def _step_down_live(self) -> bool:
        """The longest sealed page of running requests one rung down."""
        for level in range(self.knobs.kv_level):
            if not self._live_sealed[level] or not self.pool.has_cells(level + 1):
                continue
            for page in self._live_sealed[level]:
                if self.pool.floor_level(page) > level:
                    del self._live_sealed[level][page]
                    self._step_down(page)
                    if page.level < page.max_level:
                        self._live_sealed[page.level][page] = None
                    return True
        return False

    def _step_down(self, page: Page) -> None:
        if self.pool.step_down(page):
            self._stats.add("pages_stepped_down", 1, self.pool.ladder[page.level])
        elif page.hash is not None:  # NaN or inf: nobody else may read it
            del self._by_hash[page.hash]
            page.hash = None

    def _release_one(self, state: PageState, now: float) -> bool:
        page = self.idle.least(state, now)
        if page is not None:
            self._release(page, now)
        return page is not None

    def _release(self, page: Page, now: float) -> None:
        self._stats.add("pages_released", 1, STATE_LABELS[page.state])
        self._stats.observe("page_idle_before_release_seconds", now - page.last_use)
        self._drop(page)

    def _drop(self, page: Page) -> None:
        """An idle page ceases to be."""
        self.idle.remove(page)
        if page.hash is not None:
            del self._by_hash[page.hash]
        self.pool.free(page)

    # ------------------------------------------------------------------ checks
    def check_integrity(self) -> None:
        """The pool's and the idle pages' checks, and: hashes and limits agree with the pages."""
        self.pool.check_integrity()
        self.idle.check_integrity()
        for level, pages in enumerate(self._live_sealed):
            kept = [page.page_id for page in pages if page.level != level or page.max_level <= level]
            if kept:
                raise PoolIntegrityError(f"pages {kept} may not be stepped down from level {level}")
        for block, page in self._by_hash.items():
            if page.hash != block or not page.is_sealed:
                raise PoolIntegrityError(f"page {page.page_id}: hash {page.hash} is found under {block}")
