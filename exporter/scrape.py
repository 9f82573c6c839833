"""Reads /metrics back into the snapshot it was made from."""

import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from types import TracebackType
from typing import Self

import httpx
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvpilot.engine.errors import KVPilotError
from kvpilot.engine.stats import METRICS, Histogram, Series, StatsSnapshot
from kvpilot.exporter.collector import MODEL_LABEL, PREFIX, TIME_METRIC

# Servers close idle connections after some seconds, uvicorn after 5: not just when one is used again.
IDLE_CONNECTION_SECONDS = 2.0


class ScrapeError(KVPilotError, ValueError):
    """The metrics cannot be had or are not what this version expects; the message names the metric."""


class Scraper:
    """Fetches snapshots from `url` (".../metrics"). `client` is for tests and special transports.

    `parse` is for other engines: text to snapshot, or ScrapeError.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_seconds: float = 5.0,
        client: httpx.Client | None = None,
        parse: Callable[[str], StatsSnapshot] | None = None,
    ) -> None:
        self._url = url
        self._parse = parse or parse_metrics
        self._client = client or httpx.Client(timeout=timeout_seconds)

    def snapshot(self) -> StatsSnapshot:
        """The engine's statistics now; ScrapeError if it does not answer with them."""
        try:
            response = self._client.get(self._url)
        except httpx.HTTPError as error:
            raise ScrapeError(f"{self._url}: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise ScrapeError(f"{self._url}: status {response.status_code}, expected 200")
        content_type = response.headers.get("content-type", "none")
        if not content_type.startswith("text/plain"):
            raise ScrapeError(f"{self._url}: content type {content_type}, expected text/plain")
        return self._parse(response.text)

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def parse_metrics(text: str) -> StatsSnapshot:
    """The snapshot behind an exposition text; metrics that this version does not know are ignored.

    ScrapeError names the metric that is missing, is of another kind, or has NaN or impossible values.
    """
    return snapshot_of(_families(text))


Families = dict[str, tuple[str, list[Sample]]]  # kind and samples, by name without prefix


def snapshot_of(families: Families) -> StatsSnapshot:
    """As `parse_metrics`, from samples that carry the labels of METRICS (and may carry the model's name)."""
    values: dict[Series, float] = {}
    histograms: dict[str, Histogram] = {}
    for name, metric in METRICS.items():
        samples = _samples_of(families, name, metric.kind)
        if metric.kind == "histogram":
            histograms[name] = _histogram(name, samples)
            continue
        if not metric.labels and len(samples) != 1:
            raise ScrapeError(f"{PREFIX}{name}: {len(samples)} values, expected 1")
        for sample in samples:
            series = name, _labels(name, sample)
            if series in values:
                raise ScrapeError(f"{PREFIX}{name}: two values with the labels {series[1]}, expected 1")
            values[series] = _finite(name, sample)
    time_samples = _samples_of(families, TIME_METRIC, "gauge")
    if len(time_samples) != 1:
        raise ScrapeError(f"{PREFIX}{TIME_METRIC}: {len(time_samples)} values, expected 1")
    time = _finite(TIME_METRIC, time_samples[0])
    return StatsSnapshot(time=time, values=values, histograms=histograms)


def parse_families(text: str) -> list[Metric]:
    """An exposition text of any program; ScrapeError if it is none."""
    try:
        return list(text_string_to_metric_families(text))
    except (ValueError, IndexError, KeyError) as error:
        raise ScrapeError(f"the metrics are not in Prometheus' text format: {error}") from error


def _families(text: str) -> Families:
    if not text.endswith("\n"):
        raise ScrapeError("the metrics are truncated: the last line has no end")
    ours = [family for family in parse_families(text) if family.name.startswith(PREFIX)]
    return {family.name.removeprefix(PREFIX): (family.type, family.samples) for family in ours}


def _samples_of(families: Families, name: str, kind: str) -> list[Sample]:
    if name not in families:
        raise ScrapeError(f"{PREFIX}{name}: missing; is this a kvpilot engine of another version?")
    found, samples = families[name]
    if found != kind:
        raise ScrapeError(f"{PREFIX}{name}: is a {found}, expected a {kind}")
    return samples


def _labels(name: str, sample: Sample) -> tuple[str, ...]:
    expected = METRICS[name].labels
    if set(sample.labels) - {MODEL_LABEL} != set(expected):
        raise ScrapeError(f"{PREFIX}{name}: labels {sorted(sample.labels)}, expected {sorted(expected)}")
    return tuple(sample.labels[label] for label in expected)


def _finite(name: str, sample: Sample) -> float:
    if not math.isfinite(sample.value):
        raise ScrapeError(f"{PREFIX}{name}: value {sample.value}, expected a finite number")
    return sample.value


def _histogram(name: str, samples: list[Sample]) -> Histogram:
    """Counts per bucket out of cumulative ones."""
    bounds = METRICS[name].buckets
    buckets = {float(s.labels["le"]): _finite(name, s) for s in samples if s.name.endswith("_bucket")}
    sums = [_finite(name, s) for s in samples if s.name.endswith("_sum")]
    counts = [_finite(name, s) for s in samples if s.name.endswith("_count")]
    if tuple(buckets) != (*bounds, math.inf):
        raise ScrapeError(f"{PREFIX}{name}: buckets {list(buckets)}, expected {[*bounds, math.inf]}")
    if len(sums) != 1 or counts != [buckets[math.inf]]:
        raise ScrapeError(
            f"{PREFIX}{name}: count {counts} and sum {sums} do not fit {buckets[math.inf]} observations"
        )
    cumulative = (0.0, *buckets.values())
    per_bucket = tuple(high - low for low, high in pairwise(cumulative))
    if min(per_bucket) < 0:
        raise ScrapeError(f"{PREFIX}{name}: cumulative buckets go down: {list(buckets.values())}")
    return Histogram(bounds, per_bucket, sums[0])


SUFFIXES = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
_OWN_SAMPLES = {
    f"{PREFIX}{name}{suffix}": name for name, metric in METRICS.items() for suffix in SUFFIXES[metric.kind]
}


class OwnReading:
    """A Reading (see promql.py) of kvpilot's engine. Its snapshots carry the engine's clock."""

    anchor = PREFIX + TIME_METRIC
    progress = f"{PREFIX}steps_total"

    @property
    def sample_names(self) -> list[str]:
        return [self.anchor, *_OWN_SAMPLES]

    def snapshot(self, samples: Iterable[Sample], time: float) -> StatsSnapshot:
        # A labelled counter that never counted has no series: only of the others can it be said that they are missing.
        families: Families = {name: (metric.kind, []) for name, metric in METRICS.items() if metric.labels}
        for sample in samples:
            name = TIME_METRIC if sample.name == self.anchor else _OWN_SAMPLES[sample.name]
            metric = METRICS.get(name)
            kind, own = ("gauge", ()) if metric is None else (metric.kind, (*metric.labels, "le"))
            kept = {label: sample.labels[label] for label in own if label in sample.labels}
            families.setdefault(name, (kind, []))[1].append(sample._replace(labels=kept))
        for _, some in families.values():
            some.sort(key=lambda sample: float(sample.labels.get("le", math.inf)))
        return snapshot_of(families)
