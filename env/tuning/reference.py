"""The latency of the default configuration on an episode's traffic: what savings are counted against."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING

from kvpilot.engine.model.fetch import default_cache_dir
from kvpilot.env.tuning.reward import mean_latency

if TYPE_CHECKING:
    from kvpilot.env.tuning.episode import Episode

SMOOTH_WINDOWS = 2  # on either side: a single window has a few dozen requests


@dataclass(frozen=True, kw_only=True)
class ReferenceLatency:
    """`seconds[k]` is the mean latency around window k under control; None where nothing ended or waited."""

    seconds: tuple[float | None, ...]

    def at(self, window: int) -> float | None:
        """None beyond the end, too."""
        return self.seconds[window] if window < len(self.seconds) else None


def reference_latency(episode: "Episode") -> ReferenceLatency:
    """Simulated once per episode and kept in the cache directory under the episode's hash."""
    path = default_cache_dir() / "reference" / f"{episode.hash[:32]}.json"
    try:
        return ReferenceLatency(seconds=tuple(json.loads(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError, TypeError):  # not there, or cut off by a full disk: made anew
        made = _simulate(episode)
    _keep(made, path)
    return made


def _simulate(episode: "Episode") -> ReferenceLatency:
    session = episode.start()
    session.advance(episode.interval_seconds)
    raw = [mean_latency(session.advance(episode.interval_seconds)) for _ in range(episode.num_windows)]
    return ReferenceLatency(seconds=tuple(_smooth(raw, k) for k in range(len(raw))))


def _smooth(raw: list[float | None], at: int) -> float | None:
    near = raw[max(at - SMOOTH_WINDOWS, 0) : at + SMOOTH_WINDOWS + 1]
    known = [seconds for seconds in near if seconds is not None]
    return sum(known) / len(known) if known else None


def _keep(made: ReferenceLatency, path: Path) -> None:
    """Whole or not at all: several processes may write the same. Without a writable cache it is made each time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(made.seconds, file)
        os.replace(file.name, path)
    except OSError:
        return
