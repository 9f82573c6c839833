"""The admin API: knobs, statistics and the integrity check. On a port of its own, behind a bearer token."""

import json
import math
from dataclasses import asdict
from hmac import compare_digest
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from kvpilot.engine.async_engine import AsyncEngine
from kvpilot.engine.config import KNOB_NAMES, knob_bounds
from kvpilot.engine.errors import KnobInvalidError, KnobStaleError, PoolIntegrityError, RequestError
from kvpilot.engine.server.http import BodyTooLargeError, add_error_handlers, parse_object, read_body
from kvpilot.engine.stats import METRICS, StatsSnapshot

MAX_BODY_BYTES = 64 << 10
MAX_SHOWN_CHARS = 200


def create_admin_app(engine: AsyncEngine, token: str) -> FastAPI:
    """Every route needs `Authorization: Bearer <token>`."""
    app = FastAPI(openapi_url=None)
    add_error_handlers(app)
    app.add_exception_handler(KnobInvalidError, _on_invalid)
    app.add_exception_handler(KnobStaleError, _on_stale)
    app.add_exception_handler(PoolIntegrityError, _on_broken)
    app.include_router(_router(engine), dependencies=[Depends(_token_check(token))])
    return app


def _token_check(token: str) -> Any:
    expected = f"Bearer {token}".encode()

    async def check(request: Request) -> None:
        given = request.headers.get("authorization", "").encode("utf-8", "replace")
        if not compare_digest(given, expected):
            raise HTTPException(401, "a valid bearer token is required", {"WWW-Authenticate": "Bearer"})

    return check


def _router(engine: AsyncEngine) -> APIRouter:
    router = APIRouter(prefix="/admin")
    bounds = {name: asdict(limit) for name, limit in knob_bounds(engine.engine.config).items()}
    about = {"bounds": bounds, "classes": dict.fromkeys(bounds, "hot")}

    @router.get("/knobs")
    async def get_knobs() -> Response:
        state = engine.engine.knob_state()
        return JSONResponse(
            {
                "revision": state.revision,
                "knobs": state.effective.as_dict(),
                "requested": state.requested.as_dict(),
                "deferred": list(state.deferred),
                **about,
            }
        )

    @router.patch("/knobs")
    async def patch_knobs(request: Request) -> Response:
        changes, expected_revision = _parse_patch(await _read_object(request))
        patch = engine.engine.patch_knobs(changes, expected_revision)
        knobs = engine.engine.knob_state().effective.as_dict()
        return JSONResponse({"revision": patch.revision, "results": patch.results, "knobs": knobs})

    @router.get("/stats")
    async def get_stats() -> Response:
        return JSONResponse(stats_as_json(engine.engine.snapshot()))

    @router.post("/check")
    async def check() -> Response:
        await engine.call(engine.engine.check_integrity)
        return JSONResponse({"ok": True})

    return router


async def _read_object(request: Request) -> dict[str, Any]:
    try:
        return parse_object(await read_body(request, MAX_BODY_BYTES), allow_nan=True)
    except BodyTooLargeError:
        raise
    except RequestError as error:
        raise KnobInvalidError("body", None, f"a JSON object ({error})") from error


def _parse_patch(body: dict[str, Any]) -> tuple[dict[str, object], int | None]:
    for name, value in body.items():
        if name not in ("knobs", "expected_revision"):
            raise KnobInvalidError(name, value, "one of knobs, expected_revision")
    knobs, revision = body.get("knobs"), body.get("expected_revision")
    if not isinstance(knobs, dict):
        raise KnobInvalidError("knobs", knobs, f"an object with any of {', '.join(KNOB_NAMES)}")
    if revision is not None and type(revision) is not int:
        raise KnobInvalidError("expected_revision", revision, "an integer")
    return knobs, revision


def stats_as_json(snapshot: StatsSnapshot) -> dict[str, Any]:
    """The snapshot for human eyes: labelled series as `a,b: value`, histograms as count, mean, quantiles."""
    shown: dict[str, Any] = {"time": snapshot.time}
    for (name, labels), value in sorted(snapshot.values.items()):
        if METRICS[name].labels:
            shown.setdefault(name, {})[",".join(labels)] = _finite(value)
        else:
            shown[name] = _finite(value)
    for name, histogram in snapshot.histograms.items():
        quantiles = {f"p{q}": _finite(histogram.quantile(q / 100)) for q in (50, 90, 99)}
        shown[name] = {"count": histogram.total, "mean": _finite(histogram.mean), **quantiles}
    return shown


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _show(value: object) -> object:
    """A client's value as it may be sent back: short, and a number that JSON knows."""
    text = json.dumps(value)
    if isinstance(value, float) and not math.isfinite(value):
        return text
    return value if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, KnobInvalidError)
    value = _show(error.value)
    message = f"{error.field} = {json.dumps(value)} is invalid: expected {error.bounds}"
    fields = {"field": error.field[:MAX_SHOWN_CHARS], "value": value, "bounds": error.bounds}
    return JSONResponse({"error": "invalid", **fields, "message": message[: 4 * MAX_SHOWN_CHARS]}, 422)


async def _on_stale(request: Request, error: Exception) -> Response:
    assert isinstance(error, KnobStaleError)
    body = {"error": "stale", "expected": error.expected, "current": error.current, "message": str(error)}
    return JSONResponse(body, 409)


async def _on_broken(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "integrity", "message": str(error)}, 500)
