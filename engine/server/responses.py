"""Turns a Generation into an HTTP answer, and a client that went away into an abort."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from json import dumps

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from kvpilot.engine.generation import Delta, Generation
from kvpilot.engine.request import FinishReason
from kvpilot.engine.server.formats import AnswerFormat
from kvpilot.engine.server.http import DRAIN_RETRY_SECONDS, error_body

FAILURES = {
    FinishReason.ERROR: (
        500,
        error_body("the engine failed on this request", "server_error", code="engine_failed"),
    ),
    FinishReason.ABORT: (
        503,
        error_body("the server is shutting down", "unavailable_error", code="unavailable"),
    ),
}


@contextlib.asynccontextmanager
async def abort_on_disconnect(receive: Receive, generation: Generation) -> AsyncIterator[None]:
    """Within the block, a disconnect ends `generation` with ABORT; so does leaving the block early."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.close()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        generation.close()


async def whole_answer(receive: Receive, generation: Generation, form: AnswerFormat) -> Response:
    """Wait for the end, then answer with one JSON body."""
    deltas: list[Delta] = []
    async with abort_on_disconnect(receive, generation):
        async for some in generation:
            deltas += some
    reason = deltas[-1].finish_reason
    assert reason is not None
    if reason in FAILURES:
        status, body = FAILURES[reason]
        return JSONResponse(
            body, status, {"Retry-After": str(DRAIN_RETRY_SECONDS)} if status == 503 else None
        )
    text = "".join(delta.text for delta in deltas)
    tokens = [token for delta in deltas for token in delta.tokens]
    return JSONResponse(form.body(text, tokens, reason, generation.request))


class EventStream(Response):
    """Server-sent events: one per delta, one write for all that a step brought."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, form: AnswerFormat, *, include_usage: bool) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._generation = generation
        self._form = form
        self._include_usage = include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with abort_on_disconnect(receive, self._generation):
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            await send(_part(self._form.opening()))
            async for deltas in self._generation:
                await send(_part("".join(map(self._event, deltas))))
            await send(_part(self._closing(), more=False))

    def _event(self, delta: Delta) -> str:
        failure = FAILURES.get(delta.finish_reason) if delta.finish_reason else None
        return f"data: {dumps(failure[1])}\n\n" if failure else self._form.chunk(delta)

    def _closing(self) -> str:
        with_usage = self._include_usage and self._generation.finish_reason not in FAILURES
        return (self._form.usage_chunk(self._generation.request) if with_usage else "") + "data: [DONE]\n\n"


def _part(text: str, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}
