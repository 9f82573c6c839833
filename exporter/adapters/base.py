"""How the metrics of another engine become our statistics: a table per version, and what is done with it."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

from prometheus_client.samples import Sample

from kvpilot.engine.stats import METRICS, Histogram, Series, StatsSnapshot, StatsWindow
from kvpilot.exporter.scrape import SUFFIXES, ScrapeError, parse_families
from kvpilot.exporter.source import Source

POOL = 1.0  # they export shares of their pool: of our "bytes" only the ratios mean anything
LEVEL = "native"  # whatever codec their pool was started with


@dataclass(frozen=True, kw_only=True)
class MetricMap:
    """Our name -> theirs, as they are called in an exposition text (counters with `_total`).

    Values of several series (ranks, models, reasons) are added up. A counter of ours that is not here is NaN in
    the snapshot and a gauge is absent, so that nobody takes "not measured" for zero.
    """

    engine: str
    versions: str  # which it was read from
    gauges: Mapping[str, str]
    counters: Mapping[str, str]
    histograms: Mapping[str, str]
    live_share: str  # gauge: share of the pool that running requests hold, 0 to 1
    former: Mapping[str, str] = field(default_factory=dict)  # name in older versions -> name now
    only: Mapping[str, str] = field(default_factory=dict)  # label -> the one value that counts
    tokens_per_page: int = 1
    page_counters: frozenset[str] = frozenset()  # ours in pages, theirs in tokens

    @property
    def anchor(self) -> str:
        """A gauge that is in every scrape."""
        return self.live_share

    @property
    def progress(self) -> str:
        """A counter that grows with any work: its resets are restarts."""
        return self.counters["generation_tokens"]

    @property
    def sample_names(self) -> list[str]:
        histograms = [name + suffix for name in self.histograms.values() for suffix in SUFFIXES["histogram"]]
        return [*self.gauges.values(), *self.counters.values(), self.live_share, *histograms]

    def parse(self, text: str, *, time: float) -> StatsSnapshot:
        """The snapshot behind an exposition text, at `time` of the reader's clock; ScrapeError names what is wrong."""
        families = parse_families(text)
        declared = {f"{f.name}_total" if f.type == "counter" else f.name for f in families}
        return self.snapshot((s for f in families for s in f.samples), time, declared=declared)

    def snapshot(
        self, samples: Iterable[Sample], time: float, *, declared: Iterable[str] = ()
    ) -> StatsSnapshot:
        """From samples with their own labels. A counter that is `declared` but has no sample counted nothing yet."""
        by_name: dict[str, list[Sample]] = {}
        for sample in samples:
            if all(sample.labels.get(label, value) == value for label, value in self.only.items()):
                by_name.setdefault(sample.name, []).append(sample)
        for name in declared:
            if name in self.counters.values():
                by_name.setdefault(name, [])
        values: dict[Series, float] = {
            (name, tuple("" for _ in metric.labels)): math.nan
            for name, metric in METRICS.items()
            if metric.kind == "counter"
        }
        for ours, theirs in self.gauges.items():
            values[ours, ()] = self._sum(by_name, theirs)
        for ours, theirs in self.counters.items():
            unit = self.tokens_per_page if ours in self.page_counters else 1
            labels = tuple("" for _ in METRICS[ours].labels)
            values[ours, labels] = self._sum(by_name, theirs) / unit
        shares = self._found(by_name, self.live_share)
        values["pool_bytes", ()] = POOL
        values["page_bytes", ("live", LEVEL)] = POOL * sum(s.value for s in shares) / max(len(shares), 1)
        histograms = {ours: self._histogram(by_name, theirs) for ours, theirs in self.histograms.items()}
        return StatsSnapshot(time=time, values=values, histograms=histograms)

    def _sum(self, by_name: Mapping[str, list[Sample]], name: str) -> float:
        total = sum(sample.value for sample in self._found(by_name, name))
        if not math.isfinite(total):
            raise ScrapeError(f"{name}: value {total}, expected a finite number")
        return total

    def _histogram(self, by_name: Mapping[str, list[Sample]], name: str) -> Histogram:
        cumulative: dict[float, float] = {}
        for sample in self._found(by_name, f"{name}_bucket"):
            bound = float(sample.labels["le"])
            cumulative[bound] = cumulative.get(bound, 0.0) + sample.value
        bounds = sorted(cumulative)
        if bounds[-1] != math.inf or len(bounds) < 2:
            raise ScrapeError(f"{name}: buckets {bounds}, expected bounds that end with +Inf")
        totals = [cumulative[bound] for bound in bounds]
        counts = tuple(high - low for low, high in zip([0.0, *totals], totals, strict=False))
        if not all(count >= 0 for count in counts):
            raise ScrapeError(f"{name}: cumulative buckets go down or are no numbers: {totals}")
        return Histogram(tuple(bounds[:-1]), counts, self._sum(by_name, f"{name}_sum"))

    def _found(self, by_name: Mapping[str, list[Sample]], name: str) -> list[Sample]:
        if name in by_name:
            return by_name[name]
        old = next((old for old, new in self.former.items() if new == name and old in by_name), None)
        if old is not None:
            hint = f"there is {old}, its name before: the server is older than this map"
        elif near := _renamed(name, by_name.keys() - set(self.sample_names)):
            hint = f"there is {near}: has it been renamed?"
        else:
            hint = f"is this {self.engine}, with its metrics switched on?"
        raise ScrapeError(f"{name}: missing, though {self.engine} {self.versions} exports it; {hint}")


def _renamed(name: str, exported: Iterable[str]) -> str | None:
    """The one that is most like it, whatever the order of its words."""
    sorted_words = {"_".join(sorted(other.split("_"))): other for other in exported}
    near = get_close_matches("_".join(sorted(name.split("_"))), sorted_words, n=1, cutoff=0.8)
    return sorted_words[near[0]] if near else None


class AdaptedSource:
    """A source of another engine's windows, with the age of its queue estimated, which none of them exports."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def window(self, seconds: float) -> StatsWindow:
        return with_queue_ages(self._source.window(seconds))

    def close(self) -> None:
        self._source.close()


def with_queue_ages(window: StatsWindow) -> StatsWindow:
    """Adds waiting_oldest_seconds and waiting_mean_seconds, by Little's law for a first-come queue.

    A queue of n that loses r requests per second is n / r old at its head, half of that on average; an empty one
    is 0. Left out where requests wait and none had its first token in the window: then nothing is known.
    """
    waiting = window.end.values.get(("requests_waiting", ()))
    first_tokens = window.histogram("time_to_first_token_seconds").total
    if waiting is None or (waiting > 0 and (first_tokens <= 0 or window.seconds <= 0)):
        return window
    oldest = waiting * window.seconds / first_tokens if waiting > 0 else 0.0
    ages = {("waiting_oldest_seconds", ()): oldest, ("waiting_mean_seconds", ()): oldest / 2}
    return replace(window, end=replace(window.end, values={**window.end.values, **ages}))
