"""One request as its client sees it: the event loop's end of what the engine thread produces."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from kvpilot.engine.request import FinishReason, Request, SampledToken


class Delta(NamedTuple):
    """What a request produced since its last delta. Tokens whose text is held back come with a later one."""

    text: str
    tokens: tuple[SampledToken, ...]
    finish_reason: FinishReason | None = None


class Generation:
    """One request as its client sees it; belongs to the event loop.

    Iterating gives lists of deltas: all that came since the last look, so a slow reader catches up in one go.
    The last delta has a finish reason. `request` holds the token counts for `usage`.
    """

    request: Request

    def __init__(self, request_id: str, on_finish: Callable[["Generation"], None]) -> None:
        self.request_id = request_id
        self.finish_reason: FinishReason | None = None
        self._on_finish = on_finish
        self._deltas: list[Delta] = []
        self._ready = asyncio.Event()

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> list[Delta]:
        if not self._deltas and self.finish_reason is not None:
            raise StopAsyncIteration
        await self._ready.wait()
        self._ready.clear()
        deltas, self._deltas = self._deltas, []
        return deltas

    def close(self) -> None:
        """Abort the request unless it has ended; the iteration ends with FinishReason.ABORT."""
        self.push(Delta("", (), FinishReason.ABORT))

    def push(self, delta: Delta) -> None:
        """Called by AsyncEngine. What comes after the end is dropped."""
        if self.finish_reason is not None:
            return
        self._deltas.append(delta)
        self._ready.set()
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self._on_finish(self)
