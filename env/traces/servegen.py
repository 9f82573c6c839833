"""ServeGen's series: arrival rates and length distributions per client, and traffic generated from them."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvpilot.env.traces.blocks import Floats, Ints, offsets_of
from kvpilot.env.traces.source import BadRecord, Source, archive_members, parse_object, shorten
from kvpilot.env.traces.trace import Trace, TraceError

RATE_FIELDS = ("start", "rate", "cv", "family", "parameter_1", "parameter_2")


@dataclass(frozen=True, kw_only=True, eq=False)
class RateCurve:
    """A rate that is constant in each window: `rates[k]` requests/s from `start_seconds[k]` to the next start."""

    start_seconds: Floats  # f8[K], rising
    rates: Floats  # f8[K], >= 0, not all 0
    end_seconds: float
    name: str = ""

    def __post_init__(self) -> None:
        edges = np.append(self.start_seconds, self.end_seconds)
        if len(self.start_seconds) != len(self.rates) or not len(self.rates) or (np.diff(edges) <= 0).any():
            raise TraceError(f"rate curve {self.name}: expected as many rates as rising starts, at least one")
        if not (np.isfinite(self.rates).all() and (self.rates >= 0).all() and (self.rates > 0).any()):
            raise TraceError(f"rate curve {self.name}: expected finite rates >= 0, not all of them 0")

    @staticmethod
    def of_trace(trace: Trace, window_seconds: float) -> "RateCurve":
        """Arrivals per second of a trace, counted in windows."""
        first = trace.arrival_seconds[0]
        num = int((trace.arrival_seconds[-1] - first) // window_seconds) + 1
        counts = np.bincount(
            ((trace.arrival_seconds - first) // window_seconds).astype(np.int64), minlength=num
        )
        starts = np.arange(num) * window_seconds
        return RateCurve(
            start_seconds=starts,
            rates=counts / window_seconds,
            end_seconds=num * window_seconds,
            name="of a trace",
        )

    @property
    def mean_rate(self) -> float:
        """Requests per second over the whole curve."""
        return float(self.rates @ self._widths / self._widths.sum())

    def lasting(self, seconds: float) -> "RateCurve":
        """The same shape and rates over another time: a day of drift within an hour."""
        factor = seconds / (self.end_seconds - self.start_seconds[0])
        starts = (self.start_seconds - self.start_seconds[0]) * factor
        return RateCurve(start_seconds=starts, rates=self.rates, end_seconds=seconds, name=self.name)

    def draw_times(self, num: int, rng: np.random.Generator) -> Floats:
        """`num` sorted times, seconds from the start of the curve: a Poisson process of this rate, given its number."""
        mass = np.concatenate([[0.0], np.cumsum(self.rates * self._widths)])
        edges = np.append(self.start_seconds, self.end_seconds) - self.start_seconds[0]
        return np.interp(np.sort(rng.uniform(0, mass[-1], num)), mass, edges)

    @property
    def _widths(self) -> Floats:
        return np.diff(np.append(self.start_seconds, self.end_seconds))


class LengthWindow(NamedTuple):
    """Distribution of lengths from `start_seconds` on; values and weights that sum to 1."""

    start_seconds: float
    prompt_tokens: Ints
    prompt_weights: Floats
    output_tokens: Ints
    output_weights: Floats


# ---------------------------------------------------------------------- files
def read_rate_curve(path: Path | str, client: str = "", *, skip_bad: bool = False) -> RateCurve:
    """The summed rates of all clients whose name in the archive starts with `client`, e.g. "language/m-large"."""
    source = Source(Path(path), skip_bad=skip_bad)
    total: dict[float, float] = {}
    for name, content in archive_members(source, client, ".csv"):
        for line, text in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
            try:
                start, rate = _rate_row(text)
                total[start] = total.get(start, 0.0) + rate
            except BadRecord as problem:
                source.reject(f"{name}: line {line}", problem)
    starts = np.array(sorted(total))
    if len(starts) < 2:
        raise TraceError(f"{path}: {len(starts)} windows of clients {client!r}*: expected at least 2")
    rates = np.array([total[start] for start in starts])
    end = float(starts[-1] + np.diff(starts).min())
    return RateCurve(start_seconds=starts, rates=rates, end_seconds=end, name=client or Path(path).name)


def _rate_row(text: str) -> tuple[float, float]:
    fields = text.split(",")
    if len(fields) != len(RATE_FIELDS):
        raise BadRecord(f"{len(fields)} columns: expected {', '.join(RATE_FIELDS)}")
    values = []
    for name, value in zip(RATE_FIELDS[:2], fields, strict=False):
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not 0 <= number < float("inf"):
            raise BadRecord(f"field {name}={value!r} is invalid: expected a number >= 0")
        values.append(number)
    return values[0], values[1]


def read_length_series(
    path: Path | str, client: str = "", *, skip_bad: bool = False
) -> tuple[LengthWindow, ...]:
    """Length distributions by window, the mean over the clients whose name starts with `client`."""
    source = Source(Path(path), skip_bad=skip_bad)
    pools: dict[float, tuple[dict[int, float], dict[int, float]]] = {}
    for name, content in archive_members(source, client, ".json"):
        try:
            windows = parse_object(content)
        except BadRecord as problem:
            source.reject(name, problem)
            continue
        for start, record in windows.items():
            try:
                prompt, output = (_weights(record, field) for field in ("input_tokens", "output_tokens"))
                pool = pools.setdefault(float(start), ({}, {}))
            except (BadRecord, ValueError) as problem:
                source.reject(f"{name}: window {shorten(start)}", str(problem))
                continue
            if prompt and output:  # a client that was away has neither
                for into, weights in zip(pool, (prompt, output), strict=True):
                    for value, weight in weights.items():
                        into[value] = into.get(value, 0.0) + weight
    series = [_window(start, *pools[start]) for start in sorted(pools) if pools[start][0]]
    if not series:
        raise TraceError(f"{path}: no length distribution of clients {client!r}*")
    return tuple(series)


def _weights(record: object, field: str) -> dict[int, float]:
    """A distribution is the text of a dict of numbers: "{45: 0.01, 46: 0.02}"."""
    text = record.get(field) if isinstance(record, dict) else None
    try:
        if not isinstance(text, str):
            raise ValueError
        pairs = [pair.split(":") for pair in text.strip("{} ").split(",") if pair.strip()]
        weights = {max(1, round(float(value))): float(weight) for value, weight in pairs}
        if any(weight < 0 for weight in weights.values()):
            raise ValueError
    except ValueError:
        raise BadRecord(f"field {field}={shorten(text)} is invalid: expected lengths and weights") from None
    return weights


def _window(start: float, prompt: dict[int, float], output: dict[int, float]) -> LengthWindow:
    def sides(weights: dict[int, float]) -> tuple[Ints, Floats]:
        values = np.array(sorted(weights), dtype=np.int64)
        mass = np.array([weights[int(value)] for value in values])
        return values, mass / mass.sum()

    return LengthWindow(start, *sides(prompt), *sides(output))


# ---------------------------------------------------------------------- traffic
def generate(
    curve: RateCurve,
    lengths: tuple[LengthWindow, ...],
    *,
    seed: int,
    num_requests: int | None = None,
    block_size: int = 64,
) -> Trace:
    """Requests at the curve's rate with the lengths of their time of day, independent of each other, sharing nothing.

    The windows of `lengths` are spread evenly over the curve. `num_requests` is by default what the rates give.
    """
    rng = np.random.default_rng(seed)
    seconds = curve.end_seconds - curve.start_seconds[0]
    num = num_requests if num_requests is not None else int(rng.poisson(curve.mean_rate * seconds))
    if num < 1:
        raise TraceError(f"num_requests={num} is invalid: expected >= 1 (the curve is low or short)")
    arrivals = curve.draw_times(num, rng)
    window = np.minimum((arrivals / seconds * len(lengths)).astype(np.int64), len(lengths) - 1)
    prompt, output = np.empty((2, num), dtype=np.int64)
    for k, dist in enumerate(lengths):
        rows = np.flatnonzero(window == k)
        prompt[rows] = rng.choice(dist.prompt_tokens, len(rows), p=dist.prompt_weights)
        output[rows] = rng.choice(dist.output_tokens, len(rows), p=dist.output_weights)
    offsets = offsets_of(prompt // block_size)
    step = {"step": "generate", "curve": curve.name, "mean_rate": curve.mean_rate, "seconds": seconds}
    return Trace(
        arrival_seconds=arrivals,
        prompt_tokens=prompt,
        output_tokens=output,
        block_ids=np.arange(offsets[-1]),
        block_offsets=offsets,
        block_size=block_size,
        session=np.arange(num),
        turn=np.ones(num, dtype=np.int32),
        tenant=np.zeros(num, dtype=np.int64),
        provenance=({**step, "seed": seed},),
    )
