"""What the bookkeeping knows of a page: its place, its precision, its users and its state."""

from collections.abc import Hashable
from enum import IntEnum
from typing import Final


class PageState(IntEnum):
    LIVE = 0  # used by at least one running request
    RETAINED = 1  # idle, protected from release
    UNPROTECTED = 2  # idle, released when memory is needed


LIVE: Final = PageState.LIVE
RETAINED: Final = PageState.RETAINED
UNPROTECTED: Final = PageState.UNPROTECTED
NO_LIMIT: Final = 1 << 30  # coarser than any level


class Page:
    """One page and its place. `payload` and `scales` are byte offsets into the pool (scales -1: none)."""

    __slots__ = (
        *("page_id", "level", "payload", "scales", "state", "refs", "readers", "hash", "is_sealed"),
        *("is_sink", "guards", "last_use", "idle_rank", "turn", "num_prompt_tokens", "is_stuck"),
        *("limits", "max_level"),
    )

    def __init__(self, page_id: int, payload: int) -> None:
        self.page_id = page_id
        self.level = 0
        self.payload = payload
        self.scales = -1
        self.state: PageState = LIVE
        self.refs = 1  # running requests that have it
        self.readers = 0  # those of them that decode
        self.hash: Hashable | None = None  # set while the prefix cache can find it
        self.is_sealed = False
        self.is_sink = False  # first page of its sequence
        self.guards = 0  # running requests that have it among their last tokens
        self.last_use = 0.0  # seconds; when its last user ended
        self.idle_rank = 0  # order of becoming idle; a leaf comes before its parents
        self.turn = 1  # of the conversation that used it last
        self.num_prompt_tokens = 0  # of the request that used it last
        self.is_stuck = False  # its values cannot be encoded (NaN or inf): never step down
        self.limits: list[int] | None = None  # `max_kv_level` of those of its users that set one
        self.max_level: int = NO_LIMIT  # the strictest of them

    def add_limit(self, level: int) -> None:
        """One of its users allows no coarser level than this."""
        if self.limits is None:
            self.limits = []
        self.limits.append(level)
        self.max_level = min(self.max_level, level)

    def remove_limit(self, level: int) -> None:
        """That user ends."""
        assert self.limits is not None
        self.limits.remove(level)
        self.max_level = min(self.limits, default=NO_LIMIT)
