"""What retention, cache-aware admission, stepping down of retained pages and the starvation bound are worth.

    benchmarks/retention_study.py SESSIONS.tar.xz [--minutes 40] [--users-pages 32:11000 ...]

A closed loop of coding-agent sessions on the simulated engine (8B-class costs, pages of 64 tokens). Two rules of the
engine are replaced by what other engines do, by subclasses in this file: admission in order of arrival (`fifo`), and
retained pages that keep their precision (`frozen`). Everything else is the engine's own code.
"""

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvpilot.engine.config import Knobs
from kvpilot.engine.engine import Engine
from kvpilot.engine.errors import KVPilotError
from kvpilot.engine.kv.cache import KVCache, Take
from kvpilot.engine.kv.page import Page, PageState
from kvpilot.engine.request import Request
from kvpilot.engine.scheduler import Scheduler
from kvpilot.env.replay.sim import SimReplay, replay_simulated
from kvpilot.env.simulator.latency import load_profile
from kvpilot.env.slo import Slo
from kvpilot.env.traces.readers import ReadOptions, read_trace
from kvpilot.env.traces.trace import Trace

PROFILE, PAGE_TOKENS = "h200-llama3-8b", 64


class FifoScheduler(Scheduler):
    """Admits in order of arrival: who does not fit holds up all behind."""

    def _admit(self, now: float) -> None:
        while self._has_seat() and self._try_admit(self.waiting[0], now, None):
            pass
        if self.waiting and not self.running:
            self._try_admit(self.waiting[0], now, Take.IDLE_ENGINE)

    def _by_preference(self) -> list[Request]:
        return list(self.waiting)


class FrozenCache(KVCache):
    """Retained pages keep their precision until they are unprotected."""

    def obtainable_slots(self, matched: list[Page], *, with_retained: bool) -> int:
        if with_retained:
            return super().obtainable_slots(matched, with_retained=True)
        pool = self.pool
        pages = [sum(pool.counts[PageState.LIVE][level]) for level in range(len(pool.ladder))]
        for level, row in enumerate(pool.counts[PageState.RETAINED]):
            pages[level] += sum(row)
        for page in matched:
            pages[page.level] += page.refs == 0 and page.state == PageState.UNPROTECTED
        return pool.num_slots - pool.slots_for(pages)

    def _step_down_idle(self, now: float) -> bool:
        for level in range(self.knobs.kv_level):
            page = self.idle.to_step_down(PageState.UNPROTECTED, level, now)
            if page is not None and self.pool.has_cells(level + 1):
                self._step_down_queued(page, now)
                return True
        return False


@dataclass(frozen=True, kw_only=True)
class Variant:
    label: str
    size_factor: float = 0.0
    ttl_seconds: float = 0.0
    kv_level: int = 0
    starvation_seconds: float = 120.0
    scheduler: type[Scheduler] = Scheduler
    cache: type[KVCache] = KVCache


VARIANTS = (
    Variant(label="fifo, LRU", scheduler=FifoScheduler),
    Variant(label="fifo, retention .6, 20 s", scheduler=FifoScheduler, size_factor=0.6, ttl_seconds=20),
    Variant(label="cache-aware, LRU"),
    Variant(label="cache-aware, .3, 20 s", size_factor=0.3, ttl_seconds=20),
    Variant(label="cache-aware, .6, 20 s", size_factor=0.6, ttl_seconds=20),
    Variant(label="cache-aware, .8, 20 s", size_factor=0.8, ttl_seconds=20),
    Variant(label="cache-aware, .8, 300 s", size_factor=0.8, ttl_seconds=300),
    Variant(label="starving after 60 s", size_factor=0.8, ttl_seconds=20, starvation_seconds=60),
    Variant(label="starving after 300 s", size_factor=0.8, ttl_seconds=20, starvation_seconds=300),
    Variant(label="level 2, LRU", kv_level=2),
    Variant(label="level 2, .8, 300 s", kv_level=2, size_factor=0.8, ttl_seconds=300),
    Variant(label="the same, frozen", kv_level=2, size_factor=0.8, ttl_seconds=300, cache=FrozenCache),
)


def measure(
    trace: Trace, users: int, num_pages: int, seconds: float, variant: Variant
) -> tuple[float, float, int, int]:
    """Hit rate, mean seconds to the last token (NaN without answers), requests answered, forced admissions."""
    profile = load_profile(PROFILE)
    page_bytes = PAGE_TOKENS * 2 * 2 * 32 * 8 * 128
    config = profile.engine_config(
        pool_bytes=num_pages * page_bytes,
        page_size=PAGE_TOKENS,
        max_waiting=10_000,
        starvation_seconds=variant.starvation_seconds,
        knobs=Knobs(
            max_batch=64,
            size_factor=variant.size_factor,
            ttl_seconds=variant.ttl_seconds,
            kv_level=variant.kv_level,
        ),
    )
    replay = SimReplay(profile=profile, engine=config, slo=Slo(), users=users, end_seconds=seconds)
    with _made_of(variant):
        summary = replay_simulated(trace, replay).summary
    mean = summary["e2e_seconds"].get("mean", math.nan)
    forced = summary.get("evictions", {}).get("starving", 0)
    return summary["hit_rate"], mean, summary["status"].get("done", 0), int(forced)


@contextmanager
def _made_of(variant: Variant) -> Iterator[None]:
    Engine.scheduler_class, Engine.cache_class = variant.scheduler, variant.cache
    try:
        yield
    finally:
        Engine.scheduler_class, Engine.cache_class = Scheduler, KVCache


def minutes(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: expected a number > 0")
    return value


def load(text: str) -> tuple[int, int]:
    """USERS:PAGES, both at least 1."""
    users, _, pages = text.partition(":")
    if not (users.isdecimal() and pages.isdecimal() and int(users) and int(pages)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected USERS:PAGES, as 32:11000")
    return int(users), int(pages)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, help="archive of agentic sessions")
    parser.add_argument("--minutes", type=minutes, default=40.0, help="of simulated time, default 40")
    parser.add_argument(
        "--users-pages",
        nargs="+",
        type=load,
        default=[(16, 8000), (32, 16000), (32, 11000), (48, 22000)],
        help="users and pages of 64 tokens in the pool, as USERS:PAGES",
    )
    args = parser.parse_args()
    try:
        study(args.trace, args.users_pages, 60 * args.minutes)
    except KVPilotError as error:
        parser.error(str(error))


def study(path: Path, loads: list[tuple[int, int]], seconds: float) -> None:
    """Prints a row per variant. Raises KVPilotError for a trace that cannot be read or has no think times."""
    trace = read_trace(path, options=ReadOptions(seed=1))
    console = Console()
    table = Table(title="hit rate / mean seconds / answered (pages taken by the starving)")
    table.add_column("")
    for users, pages in loads:
        table.add_column(f"{users} users, {pages:,} pages", justify="right")
    for variant in track(VARIANTS, "variants", console=Console(stderr=True)):
        cells = []
        for users, pages in loads:
            hits, mean, done, forced = measure(trace, users, pages, seconds, variant)
            cells.append(f"{hits:.2f} / {mean:.1f} / {done} ({forced})")
        table.add_row(variant.label, *cells)
    console.print(table)


if __name__ == "__main__":
    main()
