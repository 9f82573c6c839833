"""Drives sessions against an OpenAI server, streaming, and accounts for every request."""

import asyncio
import time
from dataclasses import asdict, dataclass, field
from enum import StrEnum

import httpx

from kvpilot.agent.demo.traffic import Session, Turn
from kvpilot.env.replay.completions import BUSY, STREAMED, StreamEvent, stream_client, stream_events

MAX_ATTEMPTS = 8  # of a request that is refused with 429 or 503
MAX_RETRY_SECONDS = 5.0  # a demo does not wait longer, whatever Retry-After says


class Status(StrEnum):
    DONE = "done"
    REFUSED = "refused"  # 429 or 503 until the attempts were used up
    FAILED = "failed"
    CUT_OFF = "cut off"  # still under way when the run ended


@dataclass(kw_only=True)
class TurnResult:
    """One request. Times are seconds since the run's start."""

    session: int
    turn: int
    sent: float
    status: Status = Status.CUT_OFF
    refusals: int = 0  # answers 429 or 503 that were retried
    first_token: float | None = None
    end: float | None = None
    answer_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None

    @property
    def ttft_seconds(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.sent

    @property
    def inter_token_seconds(self) -> float | None:
        """Mean over the answer."""
        if self.first_token is None or self.end is None or self.answer_tokens < 2:
            return None
        return (self.end - self.first_token) / (self.answer_tokens - 1)

    @property
    def answer_seconds(self) -> float | None:
        """Until the last token."""
        return None if self.end is None else self.end - self.sent

    def as_dict(self) -> dict[str, object]:
        return {
            **asdict(self),
            "ttft_seconds": self.ttft_seconds,
            "inter_token_seconds": self.inter_token_seconds,
            "answer_seconds": self.answer_seconds,
        }


@dataclass(kw_only=True)
class LoadRun:
    """All sessions of one run. No turn starts after `end_seconds`; `results` grows as turns are sent."""

    url: str
    model: str
    end_seconds: float
    started: float = field(default_factory=time.monotonic)
    results: list[TurnResult] = field(default_factory=list)

    def now(self) -> float:
        return time.monotonic() - self.started

    def counts(self) -> dict[str, int]:
        return {status.value: sum(r.status is status for r in self.results) for status in Status}

    async def drive(self, sessions: list[Session], drain_seconds: float) -> None:
        """Returns when every turn has ended, at the latest `drain_seconds` after `end_seconds`."""
        async with stream_client() as http:
            tasks = [asyncio.create_task(self._session(http, session)) for session in sessions]
            try:
                remaining = self.end_seconds + drain_seconds - self.now()
                done, _ = await asyncio.wait(tasks, timeout=max(remaining, 0.0))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()  # a bug of ours is raised, not swallowed

    async def _session(self, http: httpx.AsyncClient, session: Session) -> None:
        await asyncio.sleep(max(session.start_seconds - self.now(), 0.0))
        messages = [{"role": "system", "content": session.system}]
        for index, turn in enumerate(session.turns):
            await asyncio.sleep(turn.think_seconds)
            if self.now() > self.end_seconds:
                return
            messages.append({"role": "user", "content": turn.text})
            result = TurnResult(session=session.number, turn=index + 1, sent=self.now())
            self.results.append(result)
            answer = await self._turn(http, messages, turn, result)
            if result.status is not Status.DONE:
                return
            messages.append({"role": "assistant", "content": answer})

    async def _turn(
        self, http: httpx.AsyncClient, messages: list[dict[str, str]], turn: Turn, result: TurnResult
    ) -> str:
        """The answer's text; `result` says how it went."""
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": turn.answer_tokens,
            "temperature": 0,
            "ignore_eos": True,  # the same number of tokens in both runs
            **STREAMED,
        }
        try:
            for _ in range(MAX_ATTEMPTS):
                async with http.stream("POST", f"{self.url}/v1/chat/completions", json=body) as response:
                    if response.status_code == 200:
                        return await self._read(response, result)
                    detail = (await response.aread()).decode(errors="replace")
                if response.status_code not in BUSY:
                    result.status, result.error = Status.FAILED, f"{response.status_code}: {detail:.200}"
                    return ""
                result.refusals += 1
                await asyncio.sleep(_retry_after(response))
            result.status = Status.REFUSED
        except httpx.HTTPError as error:
            result.status, result.error = Status.FAILED, f"{type(error).__name__}: {error}"
        return ""

    async def _read(self, response: httpx.Response, result: TurnResult) -> str:
        pieces: list[str] = []
        async for event in stream_events(response):
            if event.error:
                result.status, result.error = Status.FAILED, f"the server says: {event.error}"
                return ""
            self._take(event, pieces, result)
        if result.status is not Status.DONE:
            result.status, result.error = Status.FAILED, "the stream ended before [DONE]"
        return "".join(pieces)

    def _take(self, event: StreamEvent, pieces: list[str], result: TurnResult) -> None:
        if event.is_end:
            result.end, result.status = self.now(), Status.DONE
        if event.text:
            result.first_token = result.first_token or self.now()
            pieces.append(event.text)
        if event.usage:
            result.prompt_tokens, result.answer_tokens, result.cached_tokens = event.usage


def _retry_after(response: httpx.Response) -> float:
    try:
        return min(max(float(response.headers.get("retry-after", 1.0)), 0.1), MAX_RETRY_SECONDS)
    except ValueError:
        return 1.0
