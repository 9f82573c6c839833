"""Streamed answers of an OpenAI-compatible server: how to connect, and what its server-sent events say."""

import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import httpx

from kvpilot.exporter.scrape import IDLE_CONNECTION_SECONDS

STREAMED = {"stream": True, "stream_options": {"include_usage": True}}  # of a request's body
BUSY = (429, 503)  # HTTP statuses of a server that takes no more for now


class Usage(NamedTuple):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompt


class StreamEvent(NamedTuple):
    """One of a stream; all but one of the fields are as by default, as a rule."""

    text: str | None = None  # that was generated, which may be ""; None: there is no choice in it
    usage: Usage | None = None
    error: str = ""  # what the server says of a failure
    is_end: bool = False  # [DONE]


def stream_client(transport: httpx.AsyncBaseTransport | None = None) -> httpx.AsyncClient:
    """For as many requests at a time as there are; a token may take as long as it takes."""
    limits = httpx.Limits(
        max_connections=None, max_keepalive_connections=64, keepalive_expiry=IDLE_CONNECTION_SECONDS
    )
    timeout = httpx.Timeout(10.0, read=None)
    return httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False, transport=transport)


async def stream_events(response: httpx.Response) -> AsyncIterator[StreamEvent]:
    """To the end of the body, also after [DONE]: or the connection could not be used again.

    A stream that ends without [DONE] was broken off. Raises httpx.HTTPError.
    """
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            yield _parse(line[5:].strip())


def _parse(data: str) -> StreamEvent:
    if data == "[DONE]":
        return StreamEvent(is_end=True)
    event = json.loads(data)
    if "error" in event:
        return StreamEvent(error=str(event["error"]))
    texts = [_text(choice) for choice in event.get("choices") or ()]
    usage = event.get("usage")
    return StreamEvent("".join(texts) if texts else None, _usage(usage) if usage else None)


def _text(choice: dict[str, Any]) -> str:
    """Of chat, or of plain completions."""
    text = choice["delta"].get("content") if "delta" in choice else choice.get("text")
    return text or ""


def _usage(usage: dict[str, Any]) -> Usage:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Usage(usage["prompt_tokens"], usage["completion_tokens"], cached)
