"""The engine on a thread of its own, behind an asyncio face: one `Generation` per request."""

import asyncio
import contextlib
import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from kvpilot.engine.engine import Engine
from kvpilot.engine.errors import EngineClosedError
from kvpilot.engine.generation import Delta, Generation
from kvpilot.engine.model.tokenizer import Tokenizer
from kvpilot.engine.request import FinishReason, Request, SampledToken, SamplingParams, StepOutput
from kvpilot.engine.text import TextStream

T = TypeVar("T")
log = logging.getLogger(__name__)

IDLE_TICK_SECONDS = 1.0  # an idle engine steps so often: pages expire and knobs take effect without traffic
MAX_FAILED_STEPS = 3  # in a row; then the engine is taken for broken


class _Stream:
    """The engine thread's end of a Generation."""

    def __init__(self, generation: Generation, request: Request, text: TextStream) -> None:
        self.generation = generation
        self.request = request
        self.text = text
        self.tokens: list[SampledToken] = []  # not handed over yet

    def take(self, text: str, finish_reason: FinishReason | None) -> Delta:
        tokens, self.tokens = tuple(self.tokens), []
        return Delta(text, tokens, finish_reason)


class AsyncEngine:
    """Owns the engine thread. `start()` it inside the event loop that serves the requests.

    A step that raises fails the admitted requests with FinishReason.ERROR and the engine goes on; after
    MAX_FAILED_STEPS in a row everything is failed and `state` stays "failed".
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, on_end: Callable[[Request], None] | None = None
    ) -> None:
        """`on_end` is called on the engine thread with each request that has ended, whatever the reason."""
        self.engine = engine
        self._tokenizer = tokenizer
        self._on_end = on_end
        self._thread = threading.Thread(target=self._run, name="kvpilot-engine", daemon=True)
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        # ------------------------------------------------------------- owned by the event loop
        self._open: set[Generation] = set()
        self._idle = asyncio.Event()
        self._draining = False
        # ------------------------------------------------------------- owned by the engine thread
        self._streams: dict[str, _Stream] = {}
        self._outbox: list[Callable[[], None]] = []
        self._failed_steps = 0
        self._failed = False  # read by both
        self._stopping = False

    @property
    def state(self) -> str:
        """ "ok", "draining" (no new requests) or "failed" (the engine is broken)."""
        if self._failed:
            return "failed"
        return "draining" if self._draining else "ok"

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._idle.set()
        self._thread.start()

    async def generate(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        cache_salt: str = "",
        stop: Sequence[str] = (),
        traceparent: str | None = None,
        max_kv_level: int | None = None,
    ) -> Generation:
        """Queue a request. Raises RequestError, EngineFullError, EngineClosedError (draining or failed)."""
        if self.state != "ok":
            raise EngineClosedError(f"the engine takes no new requests: it is {self.state}")
        generation = Generation(uuid.uuid4().hex, self._forget)
        self._open.add(generation)
        self._idle.clear()
        try:
            generation.request = await self.call(
                partial(self._add, generation, prompt, sampling, cache_salt, stop, traceparent, max_kv_level)
            )
        except BaseException:  # cancellation too: the request may be queued by now
            generation.close()
            raise
        return generation

    async def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the engine thread, between two steps."""
        assert self._loop is not None, "start() has not been called"
        future: asyncio.Future[T] = self._loop.create_future()

        def command() -> None:
            try:
                self._outbox.append(partial(_settle, future.set_result, future, function()))
            except Exception as error:  # noqa: BLE001 - handed to the caller
                self._outbox.append(partial(_settle, future.set_exception, future, error))

        self._commands.put(command)
        return await future

    async def drain(self, timeout_seconds: float) -> int:
        """Refuse new requests, let the accepted ones end, then abort the rest; returns how many those are."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()
        left = list(self._open)
        for generation in left:
            generation.close()
        return len(left)

    async def close(self) -> None:
        """Abort everything and stop the thread (after the step it is in)."""
        await self.drain(0)
        self._commands.put(self._stop)
        await asyncio.to_thread(self._thread.join)

    # ----------------------------------------------------------------- event loop

    def _forget(self, generation: Generation) -> None:
        self._open.discard(generation)
        if generation.finish_reason is FinishReason.ABORT:
            self._commands.put(partial(self._abort, generation.request_id))
        if not self._open:
            self._idle.set()

    # ----------------------------------------------------------------- engine thread

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._run_commands()
                if not self._failed and not self._stopping:
                    self._deliver(self.engine.step())
                    self._failed_steps = 0
            except Exception:
                log.exception("the engine failed in a step")
                self._recover()
            self._flush()

    def _has_work(self) -> bool:
        return not self._failed and not self._stopping and self.engine.has_work()

    def _run_commands(self) -> None:
        """Run what is queued; if there is nothing else to do, wait for it at most IDLE_TICK_SECONDS."""
        with contextlib.suppress(Empty):
            command = self._commands.get(block=not self._has_work(), timeout=IDLE_TICK_SECONDS)
            while True:
                command()
                command = self._commands.get_nowait()

    def _add(
        self,
        generation: Generation,
        prompt: list[int],
        sampling: SamplingParams,
        cache_salt: str,
        stop: Sequence[str],
        traceparent: str | None,
        max_kv_level: int | None,
    ) -> Request:
        if self._failed:
            raise EngineClosedError("the engine takes no new requests: it is failed")
        request_id = generation.request_id
        request = self.engine.add_request(
            request_id, prompt, sampling, cache_salt=cache_salt, max_kv_level=max_kv_level
        )
        request.traceparent = traceparent
        self._streams[request_id] = _Stream(generation, request, TextStream(self._tokenizer, stop))
        return request

    def _abort(self, request_id: str) -> None:
        stream = self._streams.pop(request_id, None)
        self.engine.abort(request_id)
        if stream is not None and self._on_end is not None:
            self._on_end(stream.request)

    def _stop(self) -> None:
        self._stopping = True

    def _deliver(self, outputs: Iterable[StepOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request.request_id)
            if stream is not None:
                self._advance(stream, output)

    def _advance(self, stream: _Stream, output: StepOutput) -> None:
        reason = output.finish_reason
        text = ""
        # A token that ends the request with STOP is an end or stop token: not part of the text.
        if output.token is not None and reason is not FinishReason.STOP:
            stream.tokens.append(SampledToken(output.token, output.logprobs))
            text = stream.text.push(output.token)
            if stream.text.stopped:
                if reason is None:
                    self.engine.finish(output.request.request_id, FinishReason.STOP)
                reason = FinishReason.STOP
        if reason is not None:
            self._end(stream, reason, text + stream.text.flush())
        elif text:
            self._outbox.append(partial(stream.generation.push, stream.take(text, None)))

    def _end(self, stream: _Stream, reason: FinishReason, text: str = "") -> None:
        del self._streams[stream.request.request_id]
        self._outbox.append(partial(stream.generation.push, stream.take(text, reason)))
        if self._on_end is not None:
            self._on_end(stream.request)

    def _flush(self) -> None:
        """One hand-over to the event loop per step, whatever the number of requests."""
        if self._outbox:
            outbox, self._outbox = self._outbox, []
            assert self._loop is not None
            self._loop.call_soon_threadsafe(_call_all, outbox)

    def _recover(self) -> None:
        """Fail the requests that took part in the step; give up if this does not help."""
        self._failed_steps += 1
        self._failed = self._failed_steps >= MAX_FAILED_STEPS
        victims = [s for s in self._streams.values() if s.request.first_admission_time is not None]
        if self._failed or not victims:
            victims = list(self._streams.values())
        for stream in victims:
            self._end(stream, FinishReason.ERROR)
            try:
                self.engine.finish(stream.request.request_id, FinishReason.ERROR)
            except Exception:
                log.exception("the engine cannot end request %s", stream.request.request_id)
                self._failed = True
        if self._failed:
            for stream in list(self._streams.values()):
                self._end(stream, FinishReason.ERROR)
            log.critical("the engine has failed and takes no more requests")


def _settle(setter: Callable[[Any], None], future: "asyncio.Future[Any]", value: object) -> None:
    if not future.done():  # the caller may have been cancelled
        setter(value)


def _call_all(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()
