"""What live windows tell about the traffic: enough to simulate traffic like it where none is recorded."""

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from kvpilot.engine.errors import KVPilotError
from kvpilot.engine.stats import AGE_BUCKETS, StatsSnapshot, StatsWindow
from kvpilot.exporter.source import Source

MIN_REQUESTS = 30  # admitted in the window; fewer tell too little
MIN_SAMPLES = 8
NEEDED = (
    "page_reuse_gap_seconds",
    "page_idle_before_release_seconds",
    "e2e_request_seconds",
    "queue_seconds",
)
IDLE_STATES = ("retained", "unprotected")


class TooLittleSeenError(KVPilotError):
    """Not enough traffic, or not for long enough, or the engine does not export what is needed; the message says."""


class Sample(NamedTuple):
    """Counters at one moment, as far as they speak of the traffic."""

    time: float  # seconds on the engine's clock
    arrivals: float
    admissions: float
    prompt_tokens: float
    query_tokens: float
    hit_tokens: float
    output_tokens: float
    answers: float
    service_seconds: float  # arrival to last token without the wait for admission, summed over answers
    idle_pages: float
    reused: tuple[float, ...]  # idle times of pages that were hit, by AGE_BUCKETS
    released: tuple[float, ...]  # and of those that were released


class TrafficStatistics:
    """Told of every window; remembers `seconds` of it, some 300 bytes per observation."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._samples: deque[Sample] = deque()
        self._missing: tuple[str, ...] = ()

    def note(self, window: StatsWindow) -> None:
        """A restart of the engine begins anew."""
        self._missing = tuple(name for name in NEEDED if name not in window.end.histograms)
        if self._missing:
            return
        if window.is_reset():
            self._samples.clear()
        if self._samples and window.end.time <= self._samples[-1].time:
            return
        self._samples.append(sample_of(window.end))
        while len(self._samples) > 2 and self._samples[-1].time - self._samples[1].time >= self.seconds:
            self._samples.popleft()

    def describe(self) -> dict[str, Any]:
        """The traffic as plain values (`describe`). Raises TooLittleSeenError."""
        if self._missing:
            raise TooLittleSeenError(f"the engine does not export {', '.join(self._missing)}")
        return describe(list(self._samples))


class WatchedSource:
    """A source whose windows are shown to `statistics` on their way."""

    def __init__(self, source: Source, statistics: TrafficStatistics) -> None:
        self._source, self._statistics = source, statistics

    def window(self, seconds: float) -> StatsWindow:
        window = self._source.window(seconds)
        self._statistics.note(window)
        return window

    def close(self) -> None:
        self._source.close()


def sample_of(snapshot: StatsSnapshot) -> Sample:
    histograms = snapshot.histograms
    e2e, queue = histograms["e2e_request_seconds"], histograms["queue_seconds"]
    return Sample(
        time=snapshot.time,
        arrivals=snapshot.total("requests_received") + snapshot.total("requests_rejected"),
        admissions=snapshot.total("admissions"),
        prompt_tokens=snapshot.total("prompt_tokens"),
        query_tokens=snapshot.total("prefix_query_tokens"),
        hit_tokens=snapshot.total("prefix_hit_tokens"),
        output_tokens=snapshot.total("generation_tokens"),
        answers=e2e.total,
        service_seconds=e2e.sum - queue.sum,
        idle_pages=sum(
            value
            for (name, labels), value in snapshot.values.items()
            if name == "pages" and labels[0] in IDLE_STATES
        ),
        reused=histograms["page_reuse_gap_seconds"].counts,
        released=histograms["page_idle_before_release_seconds"].counts,
    )


def describe(samples: Sequence[Sample]) -> dict[str, Any]:
    """Rates by window, moments of the lengths, hits (share, and tokens per request), and how long pages lay idle before
    they were hit or released.

    The engine exports no histogram of lengths. Their spread follows from the sums of windows: n lengths of variance v
    add up with variance n v. Raises TooLittleSeenError.
    """
    if len(samples) < MIN_SAMPLES:
        raise TooLittleSeenError(f"{len(samples)} observations so far: expected at least {MIN_SAMPLES}")
    first, last = samples[0], samples[-1]
    admitted, answers = last.admissions - first.admissions, last.answers - first.answers
    if admitted < MIN_REQUESTS or answers < MIN_REQUESTS:
        raise TooLittleSeenError(f"{admitted:g} requests in the window: expected at least {MIN_REQUESTS}")
    pairs = list(pairwise(samples))
    prompts = [(b.admissions - a.admissions, b.prompt_tokens - a.prompt_tokens) for a, b in pairs]
    outputs = [(b.answers - a.answers, b.output_tokens - a.output_tokens) for a, b in pairs]
    queries = last.query_tokens - first.query_tokens
    return {
        "arrivals": [[b.time - a.time, b.arrivals - a.arrivals] for a, b in pairs],
        "prompt_tokens": moments(prompts),
        "output_tokens": moments(outputs),
        "hit_tokens": (last.hit_tokens - first.hit_tokens) / admitted,
        "hit_rate": (last.hit_tokens - first.hit_tokens) / queries if queries else 0.0,
        "service_seconds": max(last.service_seconds - first.service_seconds, 0.0) / answers,
        "idle_bounds": list(AGE_BUCKETS),
        "reused": [b - a for a, b in zip(first.reused, last.reused, strict=True)],
        "released": [b - a for a, b in zip(first.released, last.released, strict=True)],
        "more_idle_pages": max(last.idle_pages - first.idle_pages, 0.0),
    }


def moments(sums: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Mean and coefficient of variation of what was summed; `sums` are (number, sum) by window."""
    some = [(number, total) for number, total in sums if number > 0]
    mean = sum(total for _, total in some) / sum(number for number, _ in some)
    squares = [(total - number * mean) ** 2 / number for number, total in some]
    variance = sum(squares) / max(len(some) - 1, 1)
    return {"mean": mean, "cv": math.sqrt(variance) / mean if mean else 0.0}
