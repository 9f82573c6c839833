"""Windows out of a Prometheus server: the same that a direct scrape gives, at its scrape instants."""

import math
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from prometheus_api_client.exceptions import PrometheusApiClientException
from prometheus_api_client.prometheus_connect import PrometheusConnect
from prometheus_client.samples import Sample
from requests import PreparedRequest, RequestException, Session
from requests.auth import AuthBase
from urllib3.util.retry import Retry

from kvpilot.engine.errors import ConfigError
from kvpilot.engine.stats import StatsSnapshot, StatsWindow
from kvpilot.exporter.scrape import OwnReading, ScrapeError
from kvpilot.exporter.source import NoHistoryError, SourceError, check_window_seconds, nearest

LOOK_BACK_SECONDS = 300  # so that a target which went away is told from one that never was
LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


class Reading(Protocol):
    """How samples become a snapshot. Of `sample_names`, each target has all in every scrape."""

    @property
    def anchor(self) -> str:
        """One of them: when it was sampled, the target was scraped."""
        ...

    @property
    def progress(self) -> str:
        """A counter that grows with any work: its resets are restarts."""
        ...

    @property
    def sample_names(self) -> list[str]: ...

    def snapshot(self, samples: Iterable[Sample], time: float) -> StatsSnapshot:
        """`time` is when they were scraped, Unix time; ScrapeError names what is missing or wrong."""
        ...


class PromSource:
    """Windows of the one engine that `selector` (label -> value, such as pod or instance) names.

    Both ends are scrapes that Prometheus made, read back whole: raw values, nothing extrapolated. The newest
    may be `max_age_seconds` old by the server's clock (three scrape intervals, say), or SourceError is raised.
    Each window costs four small queries, each with `timeout_seconds` and `headers`; `bearer_token_file` is read for
    every one. `reading` is for other engines: the metric map of an adapter, to be wrapped into an AdaptedSource.
    """

    def __init__(
        self,
        url: str,
        *,
        selector: Mapping[str, str] | None = None,
        max_age_seconds: float = 45.0,
        timeout_seconds: float = 5.0,
        headers: Mapping[str, str] | None = None,
        bearer_token_file: Path | None = None,
        reading: Reading | None = None,
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
        self._reading = reading or OwnReading()
        self._session = Session()
        if bearer_token_file is not None:
            self._session.auth = TokenFile(bearer_token_file)
        self._prometheus = PrometheusConnect(
            self._url,
            headers=dict(headers or {}),
            retry=Retry(0, read=False),  # the loop asks again; waiting is its business
            session=self._session,
        )

    def window(self, seconds: float) -> StatsWindow:
        check_window_seconds(seconds)
        now = self._now()
        scrapes, progress = self._history(now, seconds)
        end = scrapes[-1]
        if now - end > self._max_age_seconds:
            raise SourceError(
                f"{self._name(self._reading.anchor)}: the newest sample is {now - end:.0f} s old, expected at most"
                f" {self._max_age_seconds:g} s: is the target down, or scraped less often?"
            )
        start = nearest(scrapes, end, seconds, float)
        if start is None:
            raise NoHistoryError(
                f"{self._name(self._reading.anchor)}: no sample is {seconds / 2:g} s older than the newest:"
                f" a window of {seconds:g} s needs one"
            )
        return StatsWindow(
            start=self._snapshot(start),
            end=self._snapshot(end),
            restarted=any(_went_down(series, start, end) for series in progress),
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

    def _history(self, now: float, seconds: float) -> tuple[list[float], list[Any]]:
        """When the target was scraped, in order, and the samples of its progress."""
        anchor, progress = self._reading.anchor, self._reading.progress
        reach = math.ceil(1.5 * seconds + self._max_age_seconds + LOOK_BACK_SECONDS)
        found = self._query(f"{{{self._matching([anchor, progress])}}}[{reach}s]", now)
        by_name = {
            name: [one for one in found if one["metric"]["__name__"] == name] for name in (anchor, progress)
        }
        for name, matching in by_name.items():
            if not matching:
                raise SourceError(
                    f"{self._name(name)}: no samples in {reach} s at {self._url}: is the engine scraped, and do"
                    " the labels fit?"
                )
        return _scrape_times(self._name(anchor), by_name[anchor]), by_name[progress]

    def _snapshot(self, at: float) -> StatsSnapshot:
        """All values of the scrape at Unix time `at`."""
        vector = self._query(f"{{{self._matching(self._reading.sample_names)}}}", at)
        samples = []
        for entry in vector:
            labels = dict(entry["metric"])
            samples.append(Sample(labels.pop("__name__"), labels, float(entry["value"][1])))
        try:
            return self._reading.snapshot(samples, at)
        except ScrapeError as error:
            raise SourceError(f"{self._url} at {at:.3f} for {{{self._selector}}}: {error}") from error

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

    def _matching(self, names: Iterable[str]) -> str:
        return f'__name__=~"{"|".join(names)}"' + (f",{self._selector}" if self._selector else "")

    def _name(self, name: str) -> str:
        return f"{name}{{{self._selector}}}"


class TokenFile(AuthBase):
    """The token is read for every request: a kubelet or an agent renews it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, r: PreparedRequest) -> PreparedRequest:
        try:
            token = self._path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not ASCII"
            raise SourceError(f"bearer_token_file={str(self._path)!r} cannot be read: {why}") from error
        if not token.isprintable() or not token or " " in token:
            raise SourceError(
                f"bearer_token_file={str(self._path)!r} is invalid: expected one token in one line"
            )
        r.headers["Authorization"] = f"Bearer {token}"
        return r


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


def _scrape_times(name: str, series: list[Any]) -> list[float]:
    """Of one target. A restarted one may have changed its labels, but no two may be alive at once."""
    targets: dict[tuple[str, str], set[float]] = {}  # several series of a target share their instants
    labels: dict[tuple[str, str], dict[str, str]] = {}
    for one in series:
        target = (one["metric"].get("job", ""), one["metric"].get("instance", ""))
        targets.setdefault(target, set()).update(float(at) for at, _ in one["values"])
        labels[target] = one["metric"]
    for one, other in pairwise(sorted(targets, key=lambda target: min(targets[target]))):
        if min(targets[other]) <= max(targets[one]):
            differing = sorted(set(labels[one].items()) ^ set(labels[other].items()))
            raise SourceError(
                f"{name} matches {len(targets)} targets, expected 1: add labels to tell {differing}"
            )
    return sorted(set().union(*targets.values()))


def _went_down(series: Any, start: float, end: float) -> bool:
    within = [float(value) for at, value in series["values"] if start <= float(at) <= end]
    return any(after < before for before, after in pairwise(within))
