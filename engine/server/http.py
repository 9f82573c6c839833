"""What both APIs share: bodies read with a limit, strict JSON, errors in one form."""

import json
import math
import re
from collections import Counter
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from kvpilot.engine.errors import EngineClosedError, EngineFullError, RequestError

DRAIN_RETRY_SECONDS = 5
JSON = "application/json"
ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class BodyTooLargeError(RequestError):
    """HTTP 413."""


class ModelNotFoundError(RequestError):
    """HTTP 404."""


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The body; BodyTooLargeError as soon as more than `limit_bytes` have arrived.

    Only what says that it is JSON is taken: a web page can send other types, or none, to a server on loopback unasked.
    """
    given = request.headers.get("content-type")
    if given is None:
        raise HTTPException(415, f"Content-Type is missing: send {JSON}")
    if given.partition(";")[0].strip().lower() != JSON:
        raise HTTPException(415, f"Content-Type {given[:80]!r} is not taken: send {JSON}")
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit_bytes:
            raise BodyTooLargeError(f"the body is larger than the limit of {limit_bytes} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def parse_object(body: bytes, *, allow_nan: bool = False) -> dict[str, Any]:
    """A JSON object; RequestError for anything else, repeated fields and lone surrogates included."""
    constant = float if allow_nan else _refuse_constant
    try:
        value = json.loads(body, parse_constant=constant, object_pairs_hook=_unique)
        if ESCAPED_SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode()  # raises if one is alone
    except RecursionError:
        raise RequestError("the body is not valid JSON: nested too deeply") from None
    except ValueError as error:  # UnicodeDecodeError and over-long integers included
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    return value


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The error form of OpenAI's API."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def add_error_handlers(app: FastAPI) -> None:
    """Turn the errors a client can cause into OpenAI's form."""
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(EngineFullError, _on_full)
    app.add_exception_handler(EngineClosedError, _on_closed)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_bug)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        repeated = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"field {repeated[:80]!r} is given twice")
    return value


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    status, code = 400, None
    if isinstance(error, BodyTooLargeError):
        status, code = 413, "body_too_large"
    elif isinstance(error, ModelNotFoundError):
        status, code = 404, "model_not_found"
    # The rest of a refused body is not read, so that the connection cannot be used again.
    headers = {"Connection": "close"} if status == 413 else None
    body = error_body(str(error), "invalid_request_error", error.field, code)
    return JSONResponse(body, status, headers)


async def _on_full(request: Request, error: Exception) -> Response:
    assert isinstance(error, EngineFullError)
    headers = {"Retry-After": str(max(1, math.ceil(error.retry_after_seconds)))}
    return JSONResponse(error_body(str(error), "rate_limit_error", code="queue_full"), 429, headers)


async def _on_closed(request: Request, error: Exception) -> Response:
    headers = {"Retry-After": str(DRAIN_RETRY_SECONDS)}
    return JSONResponse(error_body(str(error), "unavailable_error", code="unavailable"), 503, headers)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = error_body(f"{error.detail}: {request.method} {request.url.path}", "invalid_request_error")
    return JSONResponse(body, error.status_code, error.headers)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    """The client left while it sent its body: nobody reads this."""
    return Response(status_code=400)


async def _on_bug(request: Request, error: Exception) -> Response:
    """The server logs the traceback; the client learns nothing about the inside."""
    return JSONResponse(error_body("internal error", "server_error"), 500)
