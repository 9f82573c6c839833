"""What can be done about a knob on another engine: set it live, restart with a flag, or nothing."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

from kvpilot.exporter.adapters.base import MetricMap
from kvpilot.exporter.source import SourceError


class Capability(NamedTuple):
    """`flag` holds {value}; None if the engine has nothing like this knob. `values` maps levels to words."""

    knob: str
    flag: str | None
    note: str
    values: Mapping[int, str] | None = None


class Advice(NamedTuple):
    """What an operator would have to do to follow a proposal. `flag` is None where no setting does it."""

    knob: str
    value: float
    flag: str | None
    note: str

    def __str__(self) -> str:
        what = f"restart with {self.flag}" if self.flag else "cannot be set"
        return f"{self.knob} -> {self.value:g}: {what} ({self.note})"


class Discovery(NamedTuple):
    """What a server says of itself. `live` are the knobs that it claims to take while it runs."""

    version: str
    is_mapped: bool  # the version that the metric map was read from
    live: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """All that is known about one engine. No released version takes one of our knobs live."""

    metric_map: MetricMap
    version_paths: tuple[str, ...]  # the first that answers
    capabilities: tuple[Capability, ...]
    live_paths: Mapping[str, str] = field(default_factory=dict)  # knob -> the route that would set it

    def advise(self, wanted: Mapping[str, float]) -> list[Advice]:
        """One for each wanted knob, in the table's order."""
        return [_advice(one, wanted[one.knob]) for one in self.capabilities if one.knob in wanted]

    def discover(self, url: str, *, client: httpx.Client) -> Discovery:
        """Asks the server at `url`; SourceError if it does not say its version."""
        version = next((v for path in self.version_paths if (v := _version(client, url + path))), None)
        if version is None:
            tried = ", ".join(self.version_paths)
            raise SourceError(f"{url} does not say its version at {tried}: is it {self.metric_map.engine}?")
        routes = (_json(client, f"{url}/openapi.json") or {}).get("paths", {})
        live = frozenset(knob for knob, path in self.live_paths.items() if path in routes)
        known = self.metric_map.versions
        return Discovery(version, version == known or version.startswith(f"{known}."), live)


def _advice(capability: Capability, value: float) -> Advice:
    if capability.flag is None:
        return Advice(capability.knob, value, None, capability.note)
    if capability.values is None:
        flag = capability.flag.format(value=math.floor(value))
        return Advice(capability.knob, value, flag, capability.note)
    nearest = min(max(int(value), min(capability.values)), max(capability.values))
    note = (
        capability.note
        if nearest == value
        else f"{capability.note}; {nearest} is the lowest precision it has"
    )
    return Advice(capability.knob, value, capability.flag.format(value=capability.values[nearest]), note)


def _version(client: httpx.Client, url: str) -> str | None:
    version = (_json(client, url) or {}).get("version")
    return version if isinstance(version, str) else None


def _json(client: httpx.Client, url: str) -> dict[str, Any] | None:
    try:
        response = client.get(url)
        answer = response.json() if response.status_code == 200 else None
    except (httpx.HTTPError, ValueError):
        return None
    return answer if isinstance(answer, dict) else None
