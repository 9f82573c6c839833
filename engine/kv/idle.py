"""Idle pages: in which order they go, and which of them are retained, that is protected from release."""

from heapq import heappop, heappush
from math import inf

from kvpilot.engine.compiled import mypyc_attr
from kvpilot.engine.config import Knobs
from kvpilot.engine.errors import PoolIntegrityError
from kvpilot.engine.kv.eviction import EvictionPolicy
from kvpilot.engine.kv.idle_queue import IdleQueue, extreme_page
from kvpilot.engine.kv.page import RETAINED, UNPROTECTED, Page, PageState
from kvpilot.engine.kv.pool import KVPool
from kvpilot.engine.stats import StatsRecorder

IDLE_STATES = (UNPROTECTED, RETAINED)


@mypyc_attr(allow_interpreted_subclasses=True)
class IdlePages:
    """Owns the queues of idle pages and the budget of the retained ones.

    A page is retained while it has been idle for at most `ttl_seconds`, and the retained ones together fit into
    `size_factor` of the pool. What is too old, or beyond the budget, becomes unprotected.
    """

    def __init__(self, pool: KVPool, policy: EvictionPolicy, knobs: Knobs, stats: StatsRecorder) -> None:
        self.knobs = knobs
        self._first_state = _first_state(knobs)
        self._pool = pool
        self._policy = policy
        self._stats = stats
        # by state, level and is_sink: sinks stop a rung earlier and must not hide the pages behind them
        self._queues: list[list[list[IdleQueue]]] = [
            [[IdleQueue(policy), IdleQueue(policy)] for _ in pool.ladder] for _ in PageState
        ]
        self._retained: dict[int, Page] = {}  # by idle_rank
        self._retained_by_age: list[int] = []  # heap of ranks, which rise with last_use; stale ones too
        self._retained_bytes = 0
        self._may_grow = False  # retained pages left the budget, or it was raised
        self._next_rank = 0

    # ------------------------------------------------------------------ coming and going
    def add(self, page: Page) -> None:
        """The last user of a findable page has ended, at `page.last_use`; a leaf is added before its parents."""
        page.idle_rank = self._next_rank
        self._next_rank += 1
        self._pool.set_state(page, self._first_state)
        self._enqueue(page)

    def put_back(self, page: Page) -> None:
        """In its old state and order, after `remove` and a change of level."""
        self._enqueue(page)

    def remove(self, page: Page) -> None:
        self._queue(page).remove(page)
        if page.state is RETAINED:
            del self._retained[page.idle_rank]
            self._retained_bytes -= self._pool.page_bytes[page.level]
            self._may_grow = True

    def _enqueue(self, page: Page) -> None:
        self._queue(page).add(page)
        if page.state is RETAINED:
            self._retained[page.idle_rank] = page
            heappush(self._retained_by_age, page.idle_rank)
            self._retained_bytes += self._pool.page_bytes[page.level]

    def _change_state(self, page: Page, state: PageState) -> None:
        self.remove(page)
        self._pool.set_state(page, state)
        self._enqueue(page)

    def _queue(self, page: Page) -> IdleQueue:
        return self._queues[page.state][page.level][page.is_sink]

    # ------------------------------------------------------------------ order
    def least(self, state: PageState, now: float) -> Page | None:
        """The least valuable idle page of this state, over all levels."""
        return self._extreme(state, now, least=True)

    def to_step_down(self, state: PageState, level: int, now: float) -> Page | None:
        """The least valuable page of this state and level that may go a rung further down."""
        plain, sinks = self._queues[state][level]
        return plain.first(now) or (sinks.first(now) if level < self._pool.guard_level else None)

    def _extreme(self, state: PageState, now: float, *, least: bool) -> Page | None:
        pages: list[Page] = []
        for pair in self._queues[state]:
            for queue in pair:
                page = queue.first(now) if least else queue.last(now)
                if page is not None:
                    pages.append(page)
        return extreme_page(self._policy, pages, now, least)

    # ------------------------------------------------------------------ retention
    @property
    def budget_bytes(self) -> float:
        return self.knobs.size_factor * self._pool.num_slots * self._pool.slots.slot_bytes

    def set_knobs(self, knobs: Knobs, now: float) -> None:
        self.knobs = knobs
        self._first_state = _first_state(knobs)
        self._may_grow = True
        self.tick(now)

    def next_expiry(self) -> float:
        """The moment after which the oldest retained page is no longer protected; inf if there is none."""
        page = self._oldest_retained()
        return inf if page is None else page.last_use + self.knobs.ttl_seconds

    def tick(self, now: float) -> None:
        """Bring retention up to date: what is too old or over budget loses protection, what fits regains it."""
        while page := self._oldest_retained():
            if now <= page.last_use + self.knobs.ttl_seconds and self.knobs.ttl_seconds > 0:
                break
            self._change_state(page, UNPROTECTED)
            self._stats.add("pages_expired")
        self.shrink_to_budget(now)
        self._grow_to_budget(now)

    def shrink_to_budget(self, now: float) -> None:
        while self._retained_bytes > self.budget_bytes:
            page = self.least(RETAINED, now)
            assert page is not None
            self._change_state(page, UNPROTECTED)
            self._stats.add("pages_over_budget")

    def _grow_to_budget(self, now: float) -> None:
        if not self._may_grow:
            return
        self._may_grow = False
        if self.knobs.ttl_seconds == 0 or self._retained_bytes >= self.budget_bytes:
            return
        bytes_left = self.budget_bytes - self._retained_bytes
        while page := self._extreme(UNPROTECTED, now, least=False):
            bytes_left -= self._pool.page_bytes[page.level]
            if now > page.last_use + self.knobs.ttl_seconds or bytes_left < 0:
                break
            self._change_state(page, RETAINED)

    def _oldest_retained(self) -> Page | None:
        heap = self._retained_by_age
        while heap:
            page = self._retained.get(heap[0])
            if page is not None:
                return page
            heappop(heap)
        return None

    # ------------------------------------------------------------------ checks
    def check_integrity(self) -> None:
        """Raise PoolIntegrityError unless queues and retained bytes agree with the pool's counts."""
        for state in IDLE_STATES:
            for level, queues in enumerate(self._queues[state]):
                queued, booked = [len(queue.pages) for queue in queues], self._pool.counts[state][level]
                if queued != booked:
                    raise PoolIntegrityError(
                        f"{state.name} pages at level {level}: queued {queued}, booked {booked}"
                    )
        sizes = zip(self._pool.page_bytes, self._pool.counts[RETAINED], strict=True)
        retained = sum(num_bytes * sum(pages) for num_bytes, pages in sizes)
        if retained != self._retained_bytes or self._retained_bytes > self.budget_bytes:
            raise PoolIntegrityError(
                f"retained bytes: counted {retained}, booked {self._retained_bytes}, budget {self.budget_bytes}"
            )


def _first_state(knobs: Knobs) -> PageState:
    """Of a page that has just become idle."""
    return RETAINED if knobs.ttl_seconds > 0 and knobs.size_factor > 0 else UNPROTECTED
