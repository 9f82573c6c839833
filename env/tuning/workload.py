"""Distributions of episodes: which regimes follow each other, and how much traffic each of them brings."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from kvpilot.engine.errors import ConfigError
from kvpilot.env.slo import Slo
from kvpilot.env.table import TableReader, read_table
from kvpilot.env.traces.servegen import RateCurve, read_rate_curve
from kvpilot.env.tuning.episode import Episode
from kvpilot.env.tuning.schedule import Schedule, merged
from kvpilot.env.tuning.sessions import SPLITS
from kvpilot.env.tuning.traffic import LOOPS, Stream

Range = tuple[float, float]  # drawn uniformly, or on a logarithmic scale where the text says so

RANDOM = "random"


@dataclass(frozen=True, kw_only=True)
class StreamSpec:
    """Sessions of one file, and the shape that modulates their level within a regime, if any."""

    file: str  # relative to the folder of traces
    loop: str  # closed, open or one-off: see Stream
    curve_file: str | None = None  # ServeGen rates: a stretch, scaled to a mean of 1, multiplies the level
    curve_client: str = ""
    curve_seconds: Range = (60.0, 120.0)  # how long one 600 s window of the curve takes here

    def __post_init__(self) -> None:
        if self.loop not in LOOPS:
            raise ConfigError(f"loop={self.loop!r} is invalid: expected {', '.join(LOOPS)}")


@dataclass(frozen=True, kw_only=True)
class Regime:
    """How long it holds and how much each stream brings: users, or sessions started per second."""

    seconds: Range
    levels: Mapping[str, Range]  # by stream, log-uniform; a stream that is left out is silent

    def __post_init__(self) -> None:
        for name, (low, high) in {"seconds": self.seconds, **self.levels}.items():
            if not 0 < low <= high < inf:
                raise ConfigError(f"regime {name}=({low!r}, {high!r}) is invalid: expected 0 < low <= high")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Draws episodes. `order` names the regimes in turn (from a random place if `rotate`), or is "random": then no
    regime follows itself. Raises ConfigError."""

    name: str
    folder: str  # of the traces
    streams: Mapping[str, StreamSpec]
    regimes: Mapping[str, Regime]
    order: tuple[str, ...] | str = RANDOM
    rotate: bool = False
    split: str = "train"
    seconds: Range = (7200.0, 7200.0)  # under control, rounded to whole windows
    warmup_seconds: float = 600.0
    interval_seconds: float = 60.0
    pool_bytes: int = 100_000_000_000
    page_size: int = 512
    profile: str = "h200-llama3-8b"
    eviction: str = "lru"
    slo: Slo = field(default_factory=Slo)

    def __post_init__(self) -> None:
        if not self.streams or not self.regimes:
            raise ConfigError(f"workload {self.name}: expected at least one stream and one regime")
        unknown = [n for regime in self.regimes.values() for n in regime.levels if n not in self.streams]
        if unknown:
            raise ConfigError(
                f"workload {self.name}: stream {unknown[0]!r} of a regime is unknown: "
                f"expected {', '.join(self.streams)}"
            )
        named = () if self.order == RANDOM else self.order
        strange = [name for name in named if name not in self.regimes]
        if strange or isinstance(named, str):
            raise ConfigError(
                f"workload {self.name}: order={self.order!r} is invalid: expected "
                f'"random" or names of regimes ({", ".join(self.regimes)})'
            )
        if self.split not in SPLITS:
            raise ConfigError(f"split={self.split!r} is invalid: expected {', '.join(SPLITS)}")

    def with_(self, **changes: Any) -> "Workload":
        """For instance `split="test"`."""
        return replace(self, **changes)

    def draw(self, seed: int) -> Episode:
        """The same episode for the same seed."""
        rng = np.random.default_rng(seed)
        windows = round(rng.uniform(*self.seconds) / self.interval_seconds)
        end_seconds = self.warmup_seconds + windows * self.interval_seconds
        phases = self._draw_phases(rng, end_seconds)
        levels = [
            {n: _log_uniform(rng, r) for n, r in self.regimes[regime].levels.items()} for _, regime in phases
        ]
        schedules = {
            name: tuple(
                (start, level.get(name, 0.0)) for (start, _), level in zip(phases, levels, strict=True)
            )
            for name in self.streams
        }
        used = {name: schedule for name, schedule in schedules.items() if any(level for _, level in schedule)}
        return Episode(
            family=self.name,
            folder=self.folder,
            streams=tuple(self._stream(self.streams[n], used[n], rng, end_seconds) for n in used),
            seed=seed,
            split=self.split,
            phases=tuple(phases),
            seconds=windows * self.interval_seconds,
            warmup_seconds=self.warmup_seconds,
            interval_seconds=self.interval_seconds,
            pool_bytes=self.pool_bytes,
            page_size=self.page_size,
            profile=self.profile,
            eviction=self.eviction,
            slo=self.slo,
        )

    def _draw_phases(self, rng: np.random.Generator, end_seconds: float) -> list[tuple[float, str]]:
        """Starts and regimes; the first one covers the warm-up, too."""
        phases: list[tuple[float, str]] = []
        start, place = 0.0, int(rng.integers(len(self.regimes))) if self.rotate else 0
        while start < end_seconds:
            regime = self._next_regime(rng, phases, place)
            phases.append((start, regime))
            start += round(rng.uniform(*self.regimes[regime].seconds)) + (
                0 if phases[1:] else self.warmup_seconds
            )
            place += 1
        return phases

    def _next_regime(self, rng: np.random.Generator, phases: Sequence[tuple[float, str]], place: int) -> str:
        if self.order != RANDOM:
            return self.order[place % len(self.order)]
        names = list(self.regimes)
        others = [name for name in names if not phases or name != phases[-1][1]] or names
        return others[int(rng.integers(len(others)))]

    def _stream(
        self, spec: StreamSpec, level: Schedule, rng: np.random.Generator, end_seconds: float
    ) -> Stream:
        if spec.curve_file is not None:
            curve = read_rate_curve(Path(self.folder) / spec.curve_file, spec.curve_client)
            level = merged([level, _stretch_of(curve, spec, rng, end_seconds)])
        return Stream(file=spec.file, loop=spec.loop, level=level)

    # ------------------------------------------------------------------ files
    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))


def load_workload(path: Path, folder: Path | None = None) -> Workload:
    """A TOML or JSON file; `folder` of the traces, if not the one it names (relative to the file).

    Raises ConfigError.
    """
    values = read_table(path)
    folder = folder or path.parent / str(values.get("folder", "."))
    place = f"workload {str(path)!r} is malformed"
    return TableReader().build(Workload, {**values, "folder": str(folder)}, place)


def _log_uniform(rng: np.random.Generator, between: Range) -> float:
    return float(np.exp(rng.uniform(*np.log(between))))


def _stretch_of(curve: RateCurve, spec: StreamSpec, rng: np.random.Generator, end_seconds: float) -> Schedule:
    """A random stretch, around and around if the curve is shorter, with a mean of 1."""
    step = float(rng.uniform(*spec.curve_seconds))
    num = int(np.ceil(end_seconds / step))
    first = int(rng.integers(len(curve.rates)))
    rates = np.take(curve.rates, np.arange(first, first + num), mode="wrap")
    mean = rates.mean()
    shape = rates / mean if mean > 0 else np.ones(num)
    return tuple((k * step, float(level)) for k, level in enumerate(shape))
