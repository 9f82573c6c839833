"""The loop's two ways to the engine: a scrape of /metrics, and the admin API."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from kvpilot.engine.config import KnobBounds
from kvpilot.engine.errors import ConfigError, KnobInvalidError, KnobStaleError, KVPilotError
from kvpilot.engine.stats import StatsSnapshot
from kvpilot.exporter.scrape import IDLE_CONNECTION_SECONDS, ScrapeError, Scraper


class EngineUnavailableError(KVPilotError):
    """The engine does not answer, or not in a way that can be understood."""


class UnauthorizedError(KVPilotError):
    """The admin API refuses the token."""


@dataclass(frozen=True, kw_only=True)
class KnobState:
    """What GET /admin/knobs says."""

    revision: int
    effective: Mapping[str, float | int]
    requested: Mapping[str, float | int]  # differs from `effective` while a change is deferred
    bounds: Mapping[str, KnobBounds]
    classes: Mapping[str, str]

    @property
    def pending(self) -> list[str]:
        return [name for name, value in self.requested.items() if self.effective.get(name) != value]


@dataclass(frozen=True, kw_only=True)
class PatchResult:
    revision: int
    results: Mapping[str, str]  # knob -> applied, deferred or unchanged


class EngineClient:
    """Blocking; no wait for the engine is longer than `timeout_seconds`, or EngineUnavailableError is raised."""

    def __init__(self, *, url: str, admin_url: str, token: str, timeout_seconds: float = 5.0) -> None:
        self._knobs_url = f"{_checked_url(admin_url, 'admin_url')}/admin/knobs"
        self._headers = {"Authorization": f"Bearer {token}"}
        limits = httpx.Limits(keepalive_expiry=IDLE_CONNECTION_SECONDS)
        self._http = httpx.Client(timeout=timeout_seconds, limits=limits, trust_env=False)
        self._scraper = Scraper(f"{_checked_url(url, 'url')}/metrics", client=self._http)

    def close(self) -> None:
        self._http.close()

    def scrape(self) -> StatsSnapshot:
        """The engine's statistics now, on its own clock."""
        try:
            return self._scraper.snapshot()
        except ScrapeError as error:
            raise EngineUnavailableError(str(error)) from error

    def knobs(self) -> KnobState:
        body = self._admin("GET")
        try:
            bounds = {name: KnobBounds(**limit) for name, limit in body["bounds"].items()}
            return KnobState(
                revision=body["revision"],
                effective=_numbers(body["knobs"]),
                requested=_numbers(body.get("requested", body["knobs"])),
                bounds=bounds,
                classes=body["classes"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise EngineUnavailableError(f"{self._knobs_url} is not understood: {error!r}") from error

    def patch(self, knobs: Mapping[str, object], expected_revision: int | None = None) -> PatchResult:
        """Writes all or nothing. KnobStaleError and KnobInvalidError mean that nothing was applied;
        after EngineUnavailableError only a read-back tells."""
        request: dict[str, object] = {"knobs": dict(knobs)}
        if expected_revision is not None:
            request["expected_revision"] = expected_revision
        body = self._admin("PATCH", request)
        try:
            return PatchResult(revision=body["revision"], results=dict(body["results"]))
        except (KeyError, TypeError, ValueError) as error:
            raise EngineUnavailableError(f"{self._knobs_url} is not understood: {error!r}") from error

    def _admin(self, method: str, body: dict[str, object] | None = None) -> dict[str, Any]:
        response = self._send(method, body)
        answer = _json_object(response)
        match response.status_code:
            case 200 if answer is not None:
                return answer
            case 401 | 403:
                raise UnauthorizedError(f"{self._knobs_url} refuses the token: check token_file")
            case 409 if answer is not None:
                expected = (body or {}).get("expected_revision")
                current = answer.get("current", answer.get("revision"))
                raise KnobStaleError(expected if isinstance(expected, int) else -1, _int(current))
            case 422 if answer is not None and "field" in answer:
                raise KnobInvalidError(str(answer["field"]), answer.get("value"), str(answer.get("bounds")))
        raise EngineUnavailableError(
            f"{self._knobs_url} answers {response.status_code}: {response.text:.200}"
        )

    def _send(self, method: str, body: dict[str, object] | None) -> httpx.Response:
        try:
            return self._http.request(method, self._knobs_url, json=body, headers=self._headers)
        except httpx.HTTPError as error:
            raise EngineUnavailableError(
                f"{self._knobs_url} does not answer ({type(error).__name__}): is `autotune serve` running there?"
            ) from error


def _checked_url(url: str, field: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{field}={url!r} is not a URL: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"{field}={url!r} is invalid: expected http://HOST:PORT")
    return url.rstrip("/")


def read_token(path: Path) -> str:
    """The bearer token in a file; raises ConfigError if there is none."""
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a token"
        raise ConfigError(
            f"token_file={str(path)!r} cannot be read ({why}): expected the file that `autotune serve` writes"
        ) from error
    if not token:
        raise ConfigError(f"token_file={str(path)!r} is empty: expected the admin token")
    return token


def _json_object(response: httpx.Response) -> dict[str, Any] | None:
    try:
        answer = response.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None
    return answer if isinstance(answer, dict) else None


def _numbers(values: dict[str, Any]) -> dict[str, float | int]:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise TypeError(f"knob {name} is {value!r}")
    return values


def _int(value: object) -> int:
    return value if isinstance(value, int) else -1
