"""Idle pages of one state and level, so that the least and the most valuable are found quickly."""

import heapq

from kvpilot.engine.kv.eviction import EvictionPolicy
from kvpilot.engine.kv.page import Page


def extreme_page(policy: EvictionPolicy, pages: list[Page], now: float, least: bool) -> Page | None:
    """The least or the most valuable of some pages, of equal ones that idle longest or shortest."""
    if not pages:
        return None
    best = pages[0]
    if len(pages) == 1:
        return best
    best_value = policy.value(best, now)
    for page in pages[1:]:
        value = policy.value(page, now)
        is_less = value < best_value or (value == best_value and page.idle_rank < best.idle_rank)
        if is_less == least:
            best, best_value = page, value
    return best


class IdleQueue:
    """Idle pages of one state and level. Heaps with lazy deletion, one pair per bucket of the policy.

    A key is (order, idle_rank); the rank alone while that is the order of all pages seen so far.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self.pages: dict[int, Page] = {}  # by idle_rank
        self._is_ranked = True
        self._old: dict[int, list[_Key]] = {}  # the least valuable on top
        # negated, the most valuable on top; made when first needed
        self._new: dict[int, list[_Key]] | None = None
        self._latest: dict[int, list[tuple[float, int]]] | None = {} if policy.judges_both_ends else None

    def add(self, page: Page) -> None:
        bucket, order, rank = self._policy.bucket(page), self._policy.order(page), page.idle_rank
        if self._is_ranked and order != rank:
            self._leave_ranks()
        self.pages[rank] = page
        heap = self._old.get(bucket)
        if heap is None:
            heap = self._old[bucket] = []
        if self._is_ranked:
            heapq.heappush(heap, rank)
        else:
            heapq.heappush(heap, (order, rank))
        if self._new is not None:
            heap = self._new.setdefault(bucket, [])
            heapq.heappush(heap, -rank if self._is_ranked else (-order, -rank))
        if self._latest is not None:
            heapq.heappush(self._latest.setdefault(bucket, []), (-page.last_use, rank))

    def remove(self, page: Page) -> None:
        del self.pages[page.idle_rank]

    def first(self, now: float) -> Page | None:
        """The least valuable page; within a bucket, of equal order, the one idle longest."""
        if not self.pages:
            return None
        page = self._extreme(self._old, 1, now)
        if self._latest is None or page is None:
            return page
        pages = [page]
        for heap in self._latest.values():
            head = self._latest_head(heap)
            if head is not None:
                pages.append(head)
        return extreme_page(self._policy, pages, now, True)

    def last(self, now: float) -> Page | None:
        """The most valuable page; within a bucket, of equal order, the one idle shortest."""
        if not self.pages:
            return None
        if self._new is None:
            self._new = {bucket: sorted(map(_negated, heap)) for bucket, heap in self._old.items()}
        return self._extreme(self._new, -1, now)

    def _latest_head(self, heap: list[tuple[float, int]]) -> Page | None:
        """Of the pages that became idle last, the leaf: it goes before its parents from this end too."""
        pages = self.pages
        if len(heap) > 64 + 4 * len(pages):
            heap[:] = sorted({key for key in heap if key[1] in pages})
        while heap:
            page = pages.get(heap[0][1])
            if page is not None:
                return page
            heapq.heappop(heap)
        return None

    def _leave_ranks(self) -> None:
        self._is_ranked = False
        for heaps in (self._old, self._new or {}):
            for heap in heaps.values():
                heap[:] = [(rank, rank) for rank in map(_rank, heap)]

    def _extreme(self, heaps: dict[int, list["_Key"]], sign: int, now: float) -> Page | None:
        heads: list[Page] = []
        for heap in heaps.values():
            head = self._head(heap, sign)
            if head is not None:
                heads.append(head)
        return extreme_page(self._policy, heads, now, sign > 0)

    def _head(self, heap: list["_Key"], sign: int) -> Page | None:
        pages = self.pages
        if len(heap) > 64 + 4 * len(pages):
            heap[:] = sorted({key for key in heap if sign * _rank(key) in pages})  # pyright: ignore
        while heap:
            page = pages.get(sign * _rank(heap[0]))
            if page is not None:
                return page
            heapq.heappop(heap)
        return None


_Key = int | tuple[float, int]


def _rank(key: _Key) -> int:
    return key if isinstance(key, int) else key[1]


def _negated(key: _Key) -> _Key:
    return -key if isinstance(key, int) else (-key[0], -key[1])
