"""A trace against an OpenAI-compatible server, in real time and open loop: nobody waits for an answer to send."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Any

import httpx

from kvpilot.engine.errors import ConfigError, KVPilotError
from kvpilot.engine.stats import StatsSnapshot
from kvpilot.env.replay.completions import BUSY, STREAMED, stream_client, stream_events
from kvpilot.env.replay.limits import check_number
from kvpilot.env.replay.result import CUT_OFF, DONE, FAILED, REFUSED, REQUEST_COLUMNS, ReplayResult
from kvpilot.env.replay.summary import summarize
from kvpilot.env.replay.synthetic import SyntheticText
from kvpilot.env.replay.windows import window_columns
from kvpilot.env.slo import Slo
from kvpilot.env.traces.trace import Trace
from kvpilot.exporter.scrape import ScrapeError, Scraper

MAX_ERRORS_KEPT = 20


class ServerError(KVPilotError):
    """The server cannot be replayed against; the message says what it answered."""


@dataclass(frozen=True, kw_only=True)
class HttpReplay:
    """`prompts` is ids (token ids), words, or auto: what the server takes.

    Replies are the server's own, so that a later turn cannot hit them: it repeats the recorded ones.
    """

    url: str
    model: str
    slo: Slo
    prompts: str = "auto"
    vocab_size: int = 30_000
    window_seconds: float = 10.0
    end_seconds: float = inf  # no request is sent later
    drain_seconds: float = 60.0  # how long to wait for the last answers
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"url={self.url!r} is invalid: expected sim, http://... or https://...")
        if self.prompts not in ("auto", "ids", "words"):
            raise ConfigError(f"prompts={self.prompts!r} is invalid: expected auto, ids or words")
        check_number(self.window_seconds, name="window_seconds", above=0.0)
        check_number(self.end_seconds, name="end_seconds", above=0.0, may_be_inf=True)
        check_number(self.drain_seconds, name="drain_seconds", low=0.0)
        check_number(self.vocab_size, name="vocab_size", low=2)
        check_number(self.seed, name="seed", low=0)


@dataclass
class _Sent:
    """One request under way; times are seconds since the replay began."""

    row: int
    sent: float
    status: str = CUT_OFF
    first: float | None = None
    last: float | None = None
    cached_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass
class _Run:
    trace: Trace
    replay: HttpReplay
    http: httpx.AsyncClient
    text: SyntheticText
    use_ids: bool = True
    ignore_eos: bool = True
    started: float = 0.0
    sent: list[_Sent] = field(default_factory=list)
    num_ended: int = 0
    errors: list[str] = field(default_factory=list)
    reasons: dict[str, Counter[str]] = field(default_factory=lambda: {REFUSED: Counter(), FAILED: Counter()})

    def now(self) -> float:
        return time.monotonic() - self.started

    # ------------------------------------------------------------------ what the server takes
    async def probe(self) -> None:
        """One token, in the best form that is accepted. Raises ServerError."""
        forms = [(ids, eos) for ids in (True, False) for eos in (True, False)]
        if self.replay.prompts != "auto":
            forms = [form for form in forms if form[0] == (self.replay.prompts == "ids")]
        answer = ""
        for self.use_ids, self.ignore_eos in forms:
            body = self._body([1000, 1001, 1002, 1003] if self.use_ids else "time year", 1) | {
                "stream": False
            }
            body.pop("stream_options")
            try:
                response = await self.http.post(f"{self.replay.url}/v1/completions", json=body)
            except httpx.HTTPError as error:
                raise ServerError(f"{self.replay.url}: {type(error).__name__}: {error}") from error
            if response.status_code == 200:
                return
            answer = f"{response.status_code}: {response.text:.200}"
        raise ServerError(f"{self.replay.url}/v1/completions does not take the prompts: it answers {answer}")

    def _body(self, prompt: list[int] | str, max_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.replay.model, "prompt": prompt, "max_tokens": max_tokens}
        body |= {"temperature": 0, **STREAMED}
        return body | ({"ignore_eos": True} if self.ignore_eos else {})

    # ------------------------------------------------------------------ sending
    async def send_all(self, is_stopped: Callable[[], bool], progress: Callable[[int, int], None]) -> None:
        """Ends when all is answered, the drain is over, or somebody stops it."""
        tasks: set[asyncio.Task[None]] = set()
        self.started = time.monotonic()
        for row, at in enumerate(self.trace.arrival_seconds.tolist()):
            if at > self.replay.end_seconds or not await self._wait_until(at, is_stopped, progress):
                break
            prompt = self.text.prompt(row) if self.use_ids else self.text.prompt_text(row)
            request = _Sent(row, self.now())
            self.sent.append(request)
            tasks.add(asyncio.create_task(self._send(request, prompt)))
        deadline = self.now() + self.replay.drain_seconds
        while not is_stopped() and self.now() < deadline and not all(task.done() for task in tasks):
            await asyncio.sleep(0.1)
            progress(self.num_ended, len(self.trace))
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    async def _wait_until(
        self, at: float, is_stopped: Callable[[], bool], progress: Callable[[int, int], None]
    ) -> bool:
        while (left := at - self.now()) > 0 and not is_stopped():
            progress(self.num_ended, len(self.trace))
            await asyncio.sleep(min(left, 0.2))
        return not is_stopped()

    async def _send(self, request: _Sent, prompt: list[int] | str) -> None:
        body = self._body(prompt, int(self.trace.output_tokens[request.row]))
        try:
            async with self.http.stream("POST", f"{self.replay.url}/v1/completions", json=body) as response:
                if response.status_code == 200:
                    await self._read(request, response)
                else:
                    detail = (await response.aread()).decode(errors="replace")
                    request.status = REFUSED if response.status_code in BUSY else FAILED
                    self._note(request.status, f"HTTP {response.status_code}", detail)
        except httpx.HTTPError as error:
            request.status = FAILED
            self._note(FAILED, type(error).__name__, str(error))
        self.num_ended += 1

    async def _read(self, request: _Sent, response: httpx.Response) -> None:
        async for event in stream_events(response):
            if event.error:
                request.status = FAILED
                self._note(FAILED, "error event in the stream", event.error)
                return
            if event.is_end:
                request.status = DONE
            if event.text is not None:
                request.last = self.now()
                request.first = request.first or request.last
                request.output_tokens += 1  # until the usage says better
            if event.usage:
                request.prompt_tokens, request.output_tokens, request.cached_tokens = event.usage

    def _note(self, status: str, reason: str, detail: str) -> None:
        self.reasons[status][reason] += 1
        if len(self.errors) < MAX_ERRORS_KEPT:
            self.errors.append(f"{reason}: {detail:.200}")


def replay_http(
    trace: Trace,
    replay: HttpReplay,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
    is_stopped: Callable[[], bool] = lambda: False,
    transport: httpx.AsyncBaseTransport | None = None,
) -> ReplayResult:
    """Takes as long as the trace. Windows are there if the server's /metrics is kvpilot's. Raises ServerError."""
    return asyncio.run(_replay(trace, replay, progress, is_stopped, transport))


async def _replay(
    trace: Trace,
    replay: HttpReplay,
    progress: Callable[[int, int], None],
    is_stopped: Callable[[], bool],
    transport: httpx.AsyncBaseTransport | None,
) -> ReplayResult:
    text = SyntheticText(trace, vocab_size=replay.vocab_size, seed=replay.seed)
    async with stream_client(transport) as http:
        run = _Run(trace, replay, http, text)
        await run.probe()
        snapshots: list[StatsSnapshot] = []
        watcher = asyncio.create_task(_watch(replay, snapshots))
        try:
            await run.send_all(is_stopped, progress)
        finally:
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher
    return _result(run, snapshots)


async def _watch(replay: HttpReplay, snapshots: list[StatsSnapshot]) -> None:
    """Scrapes until cancelled, or until the first answer that is not ours."""
    with Scraper(f"{replay.url}/metrics") as scraper, suppress(ScrapeError):
        while True:
            snapshots.append(await asyncio.to_thread(scraper.snapshot))
            await asyncio.sleep(replay.window_seconds)


def _result(run: _Run, snapshots: list[StatsSnapshot]) -> ReplayResult:
    trace, replay = run.trace, run.replay
    rows = [_row(trace, sent) for sent in run.sent]
    requests = {name: [row[k] for row in rows] for k, name in enumerate(REQUEST_COLUMNS)}
    windows = window_columns(snapshots)
    if windows:
        first = snapshots[0].time
        windows["end_seconds"] = [end - first for end in windows["end_seconds"]]
    return ReplayResult(
        target=replay.url,
        trace={
            "provenance": list(trace.provenance),
            "num_requests": len(trace),
            "block_size": trace.block_size,
        },
        config={
            "model": replay.model,
            "prompts": "ids" if run.use_ids else "words",
            "ignore_eos": run.ignore_eos,
        },
        slo=replay.slo,
        requests=requests,
        windows=windows,
        summary=summarize(requests, windows, replay.slo, reasons=run.reasons),
        provenance={"took_seconds": run.now(), "errors": run.errors, "has_engine_statistics": bool(windows)},
        is_partial=len(run.sent) < len(trace) or any(sent.status == CUT_OFF for sent in run.sent),
    )


def _row(trace: Trace, sent: _Sent) -> tuple[Any, ...]:
    """Times count from the sending, which is the recorded arrival but for this machine's delays."""
    row, gaps = sent.row, sent.output_tokens - 1
    first, last = sent.first, sent.last
    ended = last if sent.status == DONE else None
    return (
        row,
        int(trace.session[row]),
        int(trace.turn[row]),
        sent.sent,
        None,
        None if first is None else first - sent.sent,
        (last - first) / gaps if first is not None and last is not None and gaps > 0 else None,
        None if ended is None else ended - sent.sent,
        sent.prompt_tokens or int(trace.prompt_tokens[row]),
        sent.cached_tokens,
        sent.output_tokens,
        sent.status,
    )
