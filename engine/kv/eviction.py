"""The order in which idle pages lose their place: interchangeable policies behind one interface.

A policy judges pages (`value`: the lower, the sooner it goes) and learns from requests.
"""

from collections.abc import Callable, Hashable
from math import inf
from typing import Protocol

from kvpilot.engine.kv.page import Page


class EvictionPolicy(Protocol):
    """Pages of one `bucket` keep the order of `order` while they are idle; `value` compares across buckets.

    With `judges_both_ends` the page that became idle last is compared too: where a return grows likelier with time,
    a cache too small for all keeps some pages long enough rather than all of them too short.
    """

    judges_both_ends: bool

    def bucket(self, page: Page) -> int: ...

    def order(self, page: Page) -> float:
        """Within a bucket, fixed when the page becomes idle: the lowest goes first."""
        ...

    def value(self, page: Page, now: float) -> float:
        """Across buckets, at this moment: the lowest goes first."""
        ...

    def request_arrived(self, block_hash: Callable[[int], Hashable], num_blocks: int, now: float) -> None: ...

    def request_ended(self, leaf: Page, now: float) -> None: ...


class LruPolicy:
    """Least recently used first."""

    judges_both_ends = False

    def bucket(self, page: Page) -> int:
        return 0

    def order(self, page: Page) -> float:
        return page.idle_rank

    def value(self, page: Page, now: float) -> float:
        return page.last_use

    def request_arrived(self, block_hash: Callable[[int], Hashable], num_blocks: int, now: float) -> None:
        pass

    def request_ended(self, leaf: Page, now: float) -> None:
        pass


class HazardPolicy:
    """Least likely to return within `horizon_seconds` first, by turn number and prompt length.

    For each class of (turn, prompt length) the policy counts idle spells and after which gap they ended in a
    return; P(return in (a, a + horizon] | idle for a) follows from the counts (a discrete hazard with additive
    smoothing). Spells are remembered by hash beyond the release of their pages, so that what was evicted too
    early is seen to return.
    """

    judges_both_ends = True

    TURN_CLASSES = 6
    LENGTH_BOUNDS = (512, 4096, 32768)  # prompt tokens
    GAP_BOUNDS = (1, 2, 5, 10, 20, 30, 45, 60, 90, 120, 180, 240, 360, 600, 900, 1800, 3600, inf)
    MEMORY = 20_000  # spells remembered

    def __init__(self, horizon_seconds: float = 60.0) -> None:
        self.horizon_seconds = horizon_seconds
        num = self.TURN_CLASSES * (len(self.LENGTH_BOUNDS) + 1)
        self._spells = [0.0] * num
        self._returns = [[0.0] * len(self.GAP_BOUNDS) for _ in range(num)]
        self._open: dict[Hashable, tuple[int, float]] = {}  # leaf hash -> class, start of the spell

    def bucket(self, page: Page) -> int:
        length_class = sum(page.num_prompt_tokens > bound for bound in self.LENGTH_BOUNDS)
        return min(page.turn, self.TURN_CLASSES) - 1 + self.TURN_CLASSES * length_class

    def order(self, page: Page) -> float:
        return page.idle_rank

    def value(self, page: Page, now: float) -> float:
        return self.return_probability(self.bucket(page), now - page.last_use)

    def return_probability(self, bucket: int, age: float) -> float:
        """P(return within the horizon | idle for `age` seconds), from the counts of this class."""
        returns = self._returns[bucket]
        gone = soon = 0.0
        low = 0.0
        for high, count in zip(self.GAP_BOUNDS, returns, strict=True):
            if count:
                width = min(high, 7200.0) - low
                before = min(max(age - low, 0.0), width) / width
                until = min(max(age + self.horizon_seconds - low, 0.0), width) / width
                gone += count * before
                soon += count * (until - before)
            low = high
        # one pseudo-spell that returns at a rate of one in 600 s keeps empty classes comparable (LRU-like)
        return (soon + self.horizon_seconds / (600.0 + age)) / (max(self._spells[bucket] - gone, 0.0) + 1.0)

    def request_arrived(self, block_hash: Callable[[int], Hashable], num_blocks: int, now: float) -> None:
        for index in range(num_blocks - 1, -1, -1):
            spell = self._open.pop(block_hash(index), None)
            if spell is not None:
                bucket, start = spell
                gap = now - start
                self._returns[bucket][sum(gap > bound for bound in self.GAP_BOUNDS)] += 1
                return

    def request_ended(self, leaf: Page, now: float) -> None:
        if leaf.hash is None:
            return
        bucket = self.bucket(leaf)
        self._spells[bucket] += 1
        if self._spells[bucket] > 2000:  # forget half, to follow drift
            self._spells[bucket] /= 2
            self._returns[bucket] = [count / 2 for count in self._returns[bucket]]
        self._open[leaf.hash] = (bucket, now)
        if len(self._open) > self.MEMORY:
            del self._open[next(iter(self._open))]


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LruPolicy, "hazard": HazardPolicy}
ORACLE = "belady"  # in the simulator, which hands it to the engine: it knows the future
