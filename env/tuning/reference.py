"""The latency of the default configuration on an episode's traffic: what savings are counted against."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvpilot.engine.files import write_whole
from kvpilot.engine.model.fetch import default_cache_dir
from kvpilot.engine.stats import StatsWindow
from kvpilot.env.code_digest import code_digest
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
    """Simulated once per episode and kept in the cache directory, under the hashes of episode and simulator."""
    path = default_cache_dir() / "reference" / code_digest()[:16] / f"{episode.hash[:32]}.json"
    try:
        return ReferenceLatency(seconds=tuple(json.loads(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError, TypeError):  # not there, or cut off by a full disk: made anew
        made = _simulate(episode)
    _keep(made, path)
    return made


def _simulate(episode: "Episode") -> ReferenceLatency:
    """Each window's mean is that of the windows around it, weighed by the requests that ended in them."""
    session, interval = episode.start(), episode.interval_seconds
    session.advance(interval)
    snapshots = [session.snapshot]
    for _ in range(episode.num_windows):
        session.advance(interval)
        snapshots.append(session.snapshot)
    return ReferenceLatency(
        seconds=tuple(
            mean_latency(
                StatsWindow(
                    start=snapshots[max(k - SMOOTH_WINDOWS, 0)],
                    end=snapshots[min(k + 1 + SMOOTH_WINDOWS, episode.num_windows)],
                )
            )
            for k in range(episode.num_windows)
        )
    )


def _keep(made: ReferenceLatency, path: Path) -> None:
    """Without a writable cache it is made each time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(made.seconds))
    except OSError:
        return
