"""What is steered: our engine, or another one that is only watched. What it takes live is discovered."""

import time
from collections.abc import Mapping
from typing import Protocol

import httpx

from kvpilot.agent.control.client import (
    EngineClient,
    KnobState,
    PatchResult,
    read_token,
)
from kvpilot.agent.control.config import RunSettings
from kvpilot.engine.config import EngineConfig, KnobBounds, knob_bounds
from kvpilot.engine.errors import ConfigError, KnobInvalidError
from kvpilot.engine.stats import StatsSnapshot
from kvpilot.exporter.adapters import ADAPTERS, AdaptedSource, Adapter
from kvpilot.exporter.scrape import IDLE_CONNECTION_SECONDS, ScrapeError
from kvpilot.exporter.source import ScrapeSource, Source, SourceError

STARTED_WITH = ("max_batch", "kv_level")  # what must be known to propose anything better
LARGEST_BATCH = 65_536


class Target(Protocol):
    """An Engine, where its windows come from, and what a restart would take."""

    def scrape(self) -> StatsSnapshot: ...

    def knobs(self) -> KnobState: ...

    def patch(self, knobs: Mapping[str, object], expected_revision: int | None = None) -> PatchResult: ...

    def source(self, settings: RunSettings) -> Source: ...

    def how_to_restart(self, knob: str, value: float) -> str: ...

    def close(self) -> None: ...


class OwnTarget(EngineClient):
    """kvpilot's engine: every knob is live."""

    def source(self, settings: RunSettings) -> Source:
        if settings.source == "scrape":
            return ScrapeSource(self.scrape)
        return _prometheus(settings)

    def how_to_restart(self, knob: str, value: float) -> str:
        return f"start `autotune serve` with --{knob.replace('_', '-')} {value:g}"


class WatchedTarget:
    """Another engine. None of its knobs is written: what a policy wants becomes a proposal with the flag to set."""

    def __init__(self, adapter: Adapter, settings: RunSettings) -> None:
        missing = [name for name in STARTED_WITH if name not in settings.started_with]
        if missing:
            raise ConfigError(
                f"started_with={dict(settings.started_with)!r} is invalid: {settings.target} does not tell its "
                f"settings; give {' and '.join(missing)} as it was started"
            )
        self.adapter, self.url = adapter, settings.url.rstrip("/")
        self._started_with = {"ttl_seconds": 0.0, "size_factor": 0.0, **settings.started_with}
        self._http = httpx.Client(
            timeout=settings.timeout_seconds,
            limits=httpx.Limits(keepalive_expiry=IDLE_CONNECTION_SECONDS),
            trust_env=False,
        )
        self.discovery = adapter.discover(self.url, client=self._http)
        if not self.discovery.is_mapped:
            raise ConfigError(
                f"url={self.url!r} serves {settings.target} {self.discovery.version}, whose metrics are not known: "
                f"expected {adapter.metric_map.versions}"
            )

    def scrape(self) -> StatsSnapshot:
        try:
            response = self._http.get(f"{self.url}/metrics").raise_for_status()
        except httpx.HTTPError as error:
            raise ScrapeError(f"{self.url}/metrics: {type(error).__name__}: {error}") from error
        return self.adapter.metric_map.parse(response.text, time=time.monotonic())

    def knobs(self) -> KnobState:
        """As it was started. `restart` even for what it claims to take live: that route is in no release yet."""
        bounds = watched_bounds()
        values = {
            name: int(value) if bounds[name].integer else float(value)
            for name, value in self._started_with.items()
        }
        return KnobState(
            revision=1,
            effective=values,
            requested=values,
            bounds=bounds,
            classes=dict.fromkeys(bounds, "restart"),
        )

    def patch(self, knobs: Mapping[str, object], expected_revision: int | None = None) -> PatchResult:
        """Never called: the guard refuses what is not hot."""
        name = next(iter(knobs))
        raise KnobInvalidError(name, knobs[name], "nothing: this engine takes no knob live")

    def source(self, settings: RunSettings) -> Source:
        if settings.source == "scrape":
            return AdaptedSource(ScrapeSource(self.scrape))
        return AdaptedSource(_prometheus(settings, adapter=self.adapter))

    def how_to_restart(self, knob: str, value: float) -> str:
        live = f", or live at {self.adapter.live_paths[knob]}" if knob in self.discovery.live else ""
        return "; ".join(str(advice) for advice in self.adapter.advise({knob: value})) + live

    def close(self) -> None:
        self._http.close()


def watched_bounds() -> dict[str, KnobBounds]:
    """Of an engine that does not tell its own: wide, for its start will refuse what is too much."""
    return knob_bounds(EngineConfig(max_batch_ceiling=LARGEST_BATCH, ladder=("bf16", "fp8")))


def make_target(settings: RunSettings) -> Target:
    """Raises ConfigError where the configuration does not fit it."""
    if settings.target in ADAPTERS:
        try:
            return WatchedTarget(ADAPTERS[settings.target], settings)
        except SourceError as error:
            raise ConfigError(f"url={settings.url!r} is no {settings.target} server: {error}") from error
    secret = settings.admin_token
    token = read_token(settings.token_file.expanduser()) if secret is None else secret.get_secret_value()
    return OwnTarget(
        url=settings.url,
        admin_url=settings.admin_url,
        token=token,
        timeout_seconds=settings.timeout_seconds,
    )


def _prometheus(settings: RunSettings, adapter: Adapter | None = None) -> Source:
    from kvpilot.exporter.promql import PromSource  # some 4 MB, for those who use it

    given = settings.prometheus
    headers = {name: value.get_secret_value() for name, value in given.headers.items()}
    if given.bearer_token is not None:
        headers["Authorization"] = f"Bearer {given.bearer_token.get_secret_value()}"
    return PromSource(
        given.url,
        selector=given.selector,
        headers=headers,
        bearer_token_file=given.bearer_token_file,
        max_age_seconds=3 * settings.interval_seconds,
        timeout_seconds=settings.timeout_seconds,
        reading=None if adapter is None else adapter.metric_map,
    )
