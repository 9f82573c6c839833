"""Windows out of a Prometheus server: the same that a direct scrape gives, at its scrape instants."""

import math
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from prometheus_api_client import PrometheusApiClientException, PrometheusConnect
from prometheus_client.samples import Sample
from requests import RequestException, Session
from urllib3.util.retry import Retry

from kvpilot.engine.errors import ConfigError
from kvpilot.engine.stats import METRICS, StatsSnapshot, StatsWindow
from kvpilot.exporter.collector import PREFIX, TIME_METRIC
from kvpilot.exporter.scrape import Families, ScrapeError, snapshot_of
from kvpilot.exporter.source import NoHistoryError, SourceError

STEPS = "steps"  # every engine that works counts them: a reset shows here
LOOK_BACK_SECONDS = 300  # so that a target which went away is told from one that never was
LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


class _Scrape(NamedTuple):
    """One scrape that Prometheus made."""

    at: float  # Unix time
    value: float


class PromSource:
    """Windows of the one engine that `selector` (label -> value, such as pod or instance) names.

    Both ends are scrapes that Prometheus made, read back whole: raw values, nothing extrapolated. The newest
    may be `max_age_seconds` old by the server's clock (three scrape intervals, say), or SourceError is raised.
    Each window costs four small queries, each with `timeout_seconds`.
    """

    def __init__(
        self,
        url: str,
        *,
        selector: Mapping[str, str] | None = None,
        max_age_seconds: float = 45.0,
        timeout_seconds: float = 5.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"prometheus_url={url!r} is invalid: expected http://HOST:PORT")
        for name, number in (("max_age_seconds", max_age_seconds), ("timeout_seconds", timeout_seconds)):
            if not 0 < number < math.inf:
                raise ConfigError(f"{name}={number!r} is invalid: expected a number > 0")
        self._url = url.rstrip("/")
        self._selector = render_selector(selector or {})
        self._max_age_seconds = max_age_seconds
        self._timeout_seconds = timeout_seconds
        self._session = Session()
        self._prometheus = PrometheusConnect(
            self._url,
            headers=dict(headers or {}),
            retry=Retry(0, read=False),  # the loop asks again; waiting is its business
            session=self._session,
        )

    def window(self, seconds: float) -> StatsWindow:
        if not 0 < seconds <= 86_400:
            raise ConfigError(f"seconds={seconds!r} is invalid: expected a number in (0, 86400]")
        now = self._now()
        scrapes, steps = self._history(now, seconds)
        end = scrapes[-1]
        if now - end.at > self._max_age_seconds:
            raise SourceError(
                f"{self._name(TIME_METRIC)}: the newest sample is {now - end.at:.0f} s old, expected at most"
                f" {self._max_age_seconds:g} s: is the target down, or scraped less often?"
            )
        old = [scrape for scrape in scrapes if end.at - scrape.at >= seconds / 2]
        if not old:
            raise NoHistoryError(
                f"{self._name(TIME_METRIC)}: no sample is {seconds / 2:g} s older than the newest:"
                f" a window of {seconds:g} s needs one"
            )
        start = min(old, key=lambda scrape: abs(end.at - scrape.at - seconds))
        within = [step.value for step in steps if start.at <= step.at <= end.at]
        return StatsWindow(
            start=self._snapshot(start.at),
            end=self._snapshot(end.at),
            restarted=any(after < before for before, after in pairwise(within)),
        )

    def close(self) -> None:
        self._session.close()

    # ---------------------------------------------------------------------- queries

    def _now(self) -> float:
        """The server's clock: ours may differ."""
        answer = self._query("time()")
        try:
            return float(answer[1])
        except (TypeError, ValueError, IndexError, KeyError) as error:
            raise SourceError(
                f"{self._url}: time() gives {answer!r:.80}: is it a Prometheus server?"
            ) from error

    def _history(self, now: float, seconds: float) -> tuple[list[_Scrape], list[_Scrape]]:
        """The scrapes that may be an end of the window (value: the engine's clock), and the steps counted."""
        names = f"{PREFIX}{TIME_METRIC}|{PREFIX}{STEPS}_total"
        reach = math.ceil(1.5 * seconds + self._max_age_seconds + LOOK_BACK_SECONDS)
        series = self._query(f'{{__name__=~"{names}"{self._and_selector()}}}[{reach}s]', now)
        found: dict[str, list[Any]] = {}
        for one in series:
            found.setdefault(one["metric"]["__name__"], []).append(one)
        histories = []
        for name in (TIME_METRIC, f"{STEPS}_total"):
            matching = found.get(PREFIX + name, [])
            if not matching:
                raise SourceError(
                    f"{self._name(name)}: no samples in {reach} s at {self._url}: is the engine scraped, and do"
                    " the labels fit?"
                )
            histories.append(_merged(self._name(name), matching))
        return histories[0], histories[1]

    def _snapshot(self, at: float) -> StatsSnapshot:
        """All values of the scrape at Unix time `at`."""
        names = "|".join([*METRICS, TIME_METRIC])
        query = f'{{__name__=~"{PREFIX}({names})(_total|_bucket|_sum|_count)?"{self._and_selector()}}}'
        try:
            return snapshot_of(_families(self._query(query, at)))
        except ScrapeError as error:
            raise SourceError(f"{self._url}{{{self._selector}}} at {at:.3f}: {error}") from error

    def _query(self, query: str, at: float | None = None) -> Any:
        params = {"timeout": f"{self._timeout_seconds:g}s"}
        if at is not None:
            params["time"] = f"{at:.3f}"
        try:
            return self._prometheus.custom_query(query, params, self._timeout_seconds)  # pyright: ignore[reportArgumentType] - requests takes floats
        except PrometheusApiClientException as error:
            raise SourceError(f"{self._url} refuses {query}: {error}") from error
        except RequestException as error:
            raise SourceError(f"{self._url} does not answer: {type(error).__name__}: {error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise SourceError(f"{self._url} does not answer as Prometheus does: {error!r}") from error

    def _and_selector(self) -> str:
        return f",{self._selector}" if self._selector else ""

    def _name(self, name: str) -> str:
        return f"{PREFIX}{name}{{{self._selector}}}"


def render_selector(labels: Mapping[str, str]) -> str:
    """`pod="a",instance="b"`, quoted; ConfigError names a label that cannot be one."""
    for label in labels:
        if not LABEL.fullmatch(label) or label.startswith("__"):
            raise ConfigError(f"selector label {label!r} is invalid: expected letters, digits and _")
    return ",".join(f"{label}={quoted(value)}" for label, value in labels.items())


def quoted(value: str) -> str:
    """A PromQL string."""
    escaped = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'"{escaped}"'


def _merged(name: str, series: list[Any]) -> list[_Scrape]:
    """One history. A restarted target may have changed its labels, but no two may be alive at once."""
    spans = sorted((one["values"][0][0], one["values"][-1][0], one["metric"]) for one in series)
    for (_, end, metric), (start, _, other) in pairwise(spans):
        if start <= end:
            differing = {
                key: (metric.get(key), other.get(key)) for key in metric if metric[key] != other.get(key)
            }
            raise SourceError(f"{name} matches {len(series)} targets, expected 1: add labels; {differing}")
    samples = [_Scrape(float(at), float(value)) for one in series for at, value in one["values"]]
    return sorted(samples)


def _families(vector: list[Any]) -> Families:
    """Samples by metric, without the labels that Prometheus added to them."""
    # A labelled counter that never counted has no series: only of the others can it be said that they are missing.
    families: Families = {name: (metric.kind, []) for name, metric in METRICS.items() if metric.labels}
    for entry in vector:
        labels = dict(entry["metric"])
        full_name = labels.pop("__name__")
        name, kind, own = _metric_of(full_name)
        if kind is None:
            continue
        kept = {label: labels[label] for label in own if label in labels}
        sample = Sample(full_name, kept, float(entry["value"][1]))
        families.setdefault(name, (kind, []))[1].append(sample)
    for _, samples in families.values():
        samples.sort(key=lambda sample: float(sample.labels.get("le", math.inf)))
    return families


def _metric_of(full_name: str) -> tuple[str, str | None, tuple[str, ...]]:
    """Name without prefix and suffix, kind (None if it is none of ours), and labels."""
    name = full_name.removeprefix(PREFIX)
    if name == TIME_METRIC:
        return name, "gauge", ()
    if name in METRICS and METRICS[name].kind == "gauge":
        return name, "gauge", METRICS[name].labels
    stem = name.removesuffix("_total")
    if stem != name and stem in METRICS and METRICS[stem].kind == "counter":
        return stem, "counter", METRICS[stem].labels
    for suffix in ("_bucket", "_sum", "_count"):
        stem = name.removesuffix(suffix)
        if stem != name and stem in METRICS and METRICS[stem].kind == "histogram":
            return stem, "histogram", ("le",)
    return name, None, ()
