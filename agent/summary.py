"""The report's figures: both runs, over all and by phase, with ratios tuned/static."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Run = dict[str, Any]


class Row(NamedTuple):
    """`ratio` is tuned/static; `verdict` says whether that is good, bad or even."""

    label: str
    static: str
    tuned: str
    ratio: str
    verdict: str


class _Metric(NamedTuple):
    label: str
    better: str
    form: str
    value: Callable[[list[dict], list[dict]], float | None]  # of results and samples


def quantile(values: Sequence[float], q: float) -> float | None:
    """Nearest rank; None if there are no values."""
    ordered = sorted(values)
    return ordered[max(math.ceil(q * len(ordered)) - 1, 0)] if ordered else None


def _of(field: str, q: float) -> Callable[[list[dict], list[dict]], float | None]:
    return lambda results, samples: quantile([r[field] for r in results if r[field] is not None], q)


def _answers(results: list[dict], samples: list[dict]) -> float:
    return sum(r["status"] == "done" for r in results)


def _ratio_of(top: str, bottom: str) -> Callable[[list[dict], list[dict]], float | None]:
    def value(results: list[dict], samples: list[dict]) -> float | None:
        total = sum(sample[bottom] for sample in samples)
        return sum(sample[top] for sample in samples) / total if total else None

    return value


def _mean_waiting(results: list[dict], samples: list[dict]) -> float | None:
    seconds = sum(sample["seconds"] for sample in samples)
    return sum(sample["waiting"] * sample["seconds"] for sample in samples) / seconds if seconds else None


def _mean_answer(results: list[dict], samples: list[dict]) -> float | None:
    seconds = [r["answer_seconds"] for r in results if r["status"] == "done"]
    return sum(seconds) / len(seconds) if seconds else None


def _preemptions(results: list[dict], samples: list[dict]) -> float:
    return sum(sample["preemptions"] for sample in samples)


def _most_tokens(results: list[dict], samples: list[dict]) -> float | None:
    return max((sum(sample["pages"].values()) for sample in samples), default=None)


METRICS = (
    _Metric("Answers completed", "higher", "{:.0f}", _answers),
    _Metric("Time to first token, median", "lower", "{:.2f} s", _of("ttft_seconds", 0.5)),
    _Metric("Whole answer, mean", "lower", "{:.2f} s", _mean_answer),
    _Metric("Time to first token, 95 %", "lower", "{:.2f} s", _of("ttft_seconds", 0.95)),
    _Metric("Between two tokens, median", "lower", "{:.3f} s", _of("inter_token_seconds", 0.5)),
    _Metric("Prefix cache hit rate", "higher", "{:.0%}", _ratio_of("hit_tokens", "query_tokens")),
    _Metric("Output tokens/s", "higher", "{:.0f}", _ratio_of("generation_tokens", "seconds")),
    _Metric(
        "Prompt tokens computed",
        "lower",
        "{:.0f}",
        lambda r, samples: sum(s["prefill_tokens"] for s in samples),
    ),
    _Metric("Requests waiting, mean", "lower", "{:.1f}", _mean_waiting),
    _Metric("Preemptions", "lower", "{:.0f}", _preemptions),
    _Metric("Most pages held at once", "higher", "{:.0f}", _most_tokens),
)


def summarize(data: dict[str, Any]) -> list[tuple[str, list[Row]]]:
    """("all", rows), then the same for each phase. Requests count where they were sent."""
    seconds = data["config"]["seconds_per_phase"]
    tables = [("The whole run", _rows(data, 0.0, math.inf))]
    for i, phase in enumerate(data["phases"]):
        last = i == len(data["phases"]) - 1
        tables.append((phase["name"], _rows(data, i * seconds, math.inf if last else (i + 1) * seconds)))
    return tables


def _rows(data: dict[str, Any], start: float, end: float) -> list[Row]:
    values = []
    for run in data["runs"]:
        results = [r for r in run["results"] if start <= r["sent"] < end]
        samples = [s for s in run["samples"] if start <= s["t"] < end]
        values.append([metric.value(results, samples) if samples or results else None for metric in METRICS])
    return [_row(metric, *pair) for metric, *pair in zip(METRICS, *values, strict=True)]


def _row(metric: _Metric, static: float | None, tuned: float | None) -> Row:
    left, right = ("-" if value is None else metric.form.format(value) for value in (static, tuned))
    if static is None or tuned is None or static <= 0:
        return Row(metric.label, left, right, "", "even")
    ratio = tuned / static
    better = ratio < 0.95 if metric.better == "lower" else ratio > 1.05
    worse = ratio > 1.05 if metric.better == "lower" else ratio < 0.95
    verdict = "good" if better else "bad" if worse else "even"
    return Row(metric.label, left, right, f"{ratio:.2f}", verdict)


def accounts(run: Run) -> str:
    """What became of every request sent."""
    results = run["results"]
    counts: dict[str, int] = {}
    for result in results:
        counts[result["status"]] = counts.get(result["status"], 0) + 1
    retried = sum(result["refusals"] for result in results)
    parts = [f"{number} {status}" for status, number in sorted(counts.items())]
    tail = f"; {retried} answers 429 or 503 were retried" if retried else ""
    return f"{len(results)} requests sent: {', '.join(parts) or 'none'}{tail}."
