"""The clairvoyant eviction order, as an oracle: what is used again last goes first."""

from collections.abc import Callable, Hashable
from math import inf

from kvpilot.engine.kv.page import Page
from kvpilot.env.traces.trace import Trace


class BeladyPolicy:
    """Knows all uses of every block of `trace` (in pages of the pool). Uses count as past once admitted.

    Requests that overtake each other count in order of arrival: which of several waiting ones was admitted does not
    matter to the order, all of them are due. Leave out of `trace` what the engine will refuse: its uses stay due.
    """

    judges_both_ends = False

    def __init__(self, trace: Trace) -> None:
        self._uses: dict[int, list[float]] = {}  # arrivals of the requests with a block, in order
        offsets, ids = trace.block_offsets.tolist(), trace.block_ids.tolist()
        for row, at in enumerate(trace.arrival_seconds.tolist()):
            for block in ids[offsets[row] : offsets[row + 1]]:
                self._uses.setdefault(block, []).append(at)
        self._num_past: dict[Hashable, int] = {}

    def bucket(self, page: Page) -> int:
        return 0

    def order(self, page: Page) -> float:
        return -self.next_use(page.hash)

    def value(self, page: Page, now: float) -> float:
        return self.order(page)

    def next_use(self, block: Hashable) -> float:
        """Arrival of the first request with this block that was not admitted yet; inf if there is none."""
        uses = self._uses.get(block)  # pyright: ignore[reportArgumentType]
        past = self._num_past.get(block, 0)
        return inf if uses is None or past >= len(uses) else uses[past]

    def request_arrived(self, block_hash: Callable[[int], Hashable], num_blocks: int, now: float) -> None:
        for index in range(num_blocks):
            block = block_hash(index)
            self._num_past[block] = self._num_past.get(block, 0) + 1

    def request_ended(self, leaf: Page, now: float) -> None:
        pass
