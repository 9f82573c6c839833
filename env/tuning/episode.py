"""One stretch of traffic against one engine, small enough to write down, and the same whenever it is replayed."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpilot.engine.config import EngineConfig
from kvpilot.engine.errors import ConfigError
from kvpilot.env.simulator.latency import load_profile
from kvpilot.env.slo import Slo
from kvpilot.env.tuning.session import SimulatedSession
from kvpilot.env.tuning.sessions import SessionTable, load_table
from kvpilot.env.tuning.traffic import Stream, TrafficSimulation

if TYPE_CHECKING:
    from kvpilot.env.tuning.reference import ReferenceLatency

FORM = 1  # rises when the same episode would give other traffic, or another reference


@dataclass(frozen=True, kw_only=True)
class Episode:
    """Streams of sessions, an engine, and a clock. Schedules count from the start of the warm-up.

    The engine runs for `warmup_seconds` with its default knobs (or those given to `start`), then for `seconds`
    under control. Requests beyond the model's context are left out of the traffic. Raises ConfigError.
    """

    family: str
    folder: str  # of the traces; no part of the episode's identity
    streams: tuple[Stream, ...]
    seed: int
    split: str = "train"
    phases: tuple[tuple[float, str], ...] = ()  # (from this second on, name of the regime)
    seconds: float = 7200.0
    warmup_seconds: float = 600.0
    interval_seconds: float = 60.0  # of one window
    pool_bytes: int = 100_000_000_000
    page_size: int = 512
    profile: str = "h200-llama3-8b"
    eviction: str = "lru"
    slo: Slo = field(default_factory=Slo)

    def __post_init__(self) -> None:
        if not self.streams:
            raise ConfigError("streams is empty: expected at least one stream of sessions")
        for name in ("seconds", "interval_seconds"):
            if not 0 < getattr(self, name) < inf:
                raise ConfigError(f"{name}={getattr(self, name)!r} is invalid: expected a number > 0")
        if not self.interval_seconds <= self.warmup_seconds < inf:
            raise ConfigError(
                f"warmup_seconds={self.warmup_seconds!r} is invalid: expected at least "
                f"interval_seconds={self.interval_seconds:g}, the first thing that is observed"
            )
        if self.num_windows < 1:
            raise ConfigError(
                f"seconds={self.seconds!r} is invalid: expected at least interval_seconds={self.interval_seconds:g}"
            )

    # ------------------------------------------------------------------ reading
    @property
    def num_windows(self) -> int:
        return int(self.seconds // self.interval_seconds)

    @property
    def hash(self) -> str:
        """Of all that decides the traffic and the engine, contents of the trace files included."""
        values = self.to_json()
        del values["folder"]
        values["files"] = [table.digest for table in self.tables()]
        values["profile"] = asdict(load_profile(self.profile))
        text = json.dumps(values, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def phase_at(self, window: int) -> str:
        """The regime in which a window under control begins."""
        second = self.warmup_seconds + window * self.interval_seconds
        names = [name for start, name in self.phases if start <= second]
        return names[-1] if names else self.family

    def tables(self) -> list[SessionTable]:
        """The sessions of each stream. Raises TraceError."""
        limits = {"page_size": self.page_size, "max_tokens": self._max_tokens()}
        return [load_table(Path(self.folder), stream.file, **limits) for stream in self.streams]

    # ------------------------------------------------------------------ running
    def engine_config(self) -> EngineConfig:
        """The envelope, with the profile's default knobs."""
        changes = {"pool_bytes": self.pool_bytes, "page_size": self.page_size, "eviction": self.eviction}
        return load_profile(self.profile).engine_config(**changes)

    def start(self, knobs: Mapping[str, object] | None = None) -> SimulatedSession:
        """The engine one interval before the end of its warm-up; `knobs` hold from the very first step on."""
        end_seconds = self.warmup_seconds + self.num_windows * self.interval_seconds
        profile = load_profile(self.profile)
        model = profile.needed_model
        simulation = TrafficSimulation(
            self.streams,
            self.tables(),
            self.engine_config(),
            model.page_shape(self.page_size),
            profile.for_page_size(self.page_size),
            split=self.split,
            seed=self.seed,
            end_seconds=end_seconds,
            model_max_len=model.max_len,
            quality_loss=profile.best_known_loss,
        )
        if knobs:
            simulation.engine.patch_knobs(dict(knobs))
        begin = self.warmup_seconds - self.interval_seconds
        simulation.run(until=begin)
        simulation.finished.clear()
        simulation.refused.clear()
        return SimulatedSession(simulation, end_seconds=end_seconds, due_seconds=begin)

    def reference(self) -> "ReferenceLatency":
        """Latency of the default configuration on this traffic; simulated once, then read from the cache."""
        from kvpilot.env.tuning.reference import reference_latency

        return reference_latency(self)

    def _max_tokens(self) -> int:
        model = load_profile(self.profile).needed_model
        page_bytes = model.page_shape(self.page_size).num_values * 2
        return min(model.max_len - 1, (self.pool_bytes // page_bytes - 16) * self.page_size)

    # ------------------------------------------------------------------ JSON
    def to_json(self) -> dict[str, Any]:
        return {"kvpilot_episode": FORM, **_plain(self)}

    @staticmethod
    def from_json(values: Mapping[str, Any], folder: str | Path | None = None) -> "Episode":
        """What `to_json` gave; `folder` says where the traces are here. Raises ConfigError."""
        table = dict(values)
        form = table.pop("kvpilot_episode", None)
        if form != FORM:
            raise ConfigError(f"kvpilot_episode={form!r} is invalid: expected {FORM}")
        try:
            table["streams"] = tuple(
                Stream(file=s["file"], loop=s["loop"], level=_pairs(s["level"])) for s in table["streams"]
            )
            table["phases"] = _pairs(table.get("phases", ()))
            table["slo"] = Slo(**table.get("slo", {}))
            if folder is not None:
                table["folder"] = str(folder)
            return Episode(**table)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"the episode is malformed: {error}") from error


def _plain(episode: Episode) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(episode)))


def _pairs(pairs: Any) -> tuple[tuple[float, Any], ...]:
    return tuple((first, second) for first, second in pairs)
