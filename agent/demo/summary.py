"""The report's figures: both runs, over all and by phase, with ratios tuned/static."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Run = dict[str, Any]
NOTHING = "-"


class Row(NamedTuple):
    """`ratio` is tuned/static; `verdict` says whether that is good, bad or even."""

    label: str
    static: str
    tuned: str
    ratio: str
    verdict: str


class _Metric(NamedTuple):
    label: str
    better: str  # higher, lower or neither
    form: str
    value: Callable[[list[dict], list[dict]], float | None]  # of results and samples


def quantile(values: Sequence[float], q: float) -> float | None:
    """Nearest rank; None if there are no values."""
    return float(np.quantile(values, q, method="inverted_cdf")) if values else None


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


def _most_pages(results: list[dict], samples: list[dict]) -> float | None:
    return max((sum(sample["pages"].values()) for sample in samples), default=None)


NUM_TILES, NUM_IN_OUTCOME = 6, 7  # the first ones of METRICS
SAME = 0.05  # relative difference that is called none

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
    _Metric("Most pages held at once", "neither", "{:.0f}", _most_pages),
)


def summarize(data: dict[str, Any]) -> list[tuple[str, list[Row]]]:
    """A title and rows: of all, then of each phase. Requests count where they were sent. Where a run broke off
    there is no ratio: what both got through is compared alone."""
    seconds, shared = data["config"]["seconds_per_phase"], shared_seconds(data)
    if 0 < shared < math.inf:
        tables = [(f"The first {shared:g} s, which both runs got through", _rows(data, 0.0, shared))]
    else:
        tables = [("The whole run", _rows(data, 0.0, math.inf, is_shared=shared > 0))]
    for i, phase in enumerate(data["phases"]):
        start, end = i * seconds, (i + 1) * seconds
        until = math.inf if i == len(data["phases"]) - 1 else end
        tables.append((phase["name"], _rows(data, start, until, is_shared=end <= shared)))
    return tables


def shared_seconds(data: dict[str, Any]) -> float:
    """Up to the last phase that both runs got through; infinite if both ran to their end."""
    if all(run["finished"] for run in data["runs"]):
        return math.inf
    seconds = data["config"]["seconds_per_phase"]
    return seconds * min(len(data["phases"]), *(int(run["seconds"] // seconds) for run in data["runs"]))


def _rows(data: dict[str, Any], start: float, end: float, *, is_shared: bool = True) -> list[Row]:
    values = []
    for run in data["runs"]:
        results = [r for r in run["results"] if start <= r["sent"] < end]
        samples = [s for s in run["samples"] if start <= s["t"] < end]
        values.append([metric.value(results, samples) if samples or results else None for metric in METRICS])
    rows = [_row(metric, *pair) for metric, *pair in zip(METRICS, *values, strict=True)]
    return rows if is_shared else [row._replace(ratio="", verdict="even") for row in rows]


def _row(metric: _Metric, static: float | None, tuned: float | None) -> Row:
    left, right = (NOTHING if value is None else metric.form.format(value) for value in (static, tuned))
    if static is None or tuned is None:
        return Row(metric.label, left, right, "", "even")
    ratio = tuned / static if static else math.inf if tuned else 1.0
    if metric.better == "neither" or abs(ratio - 1) <= SAME:
        verdict = "even"
    else:
        verdict = "good" if (ratio > 1) == (metric.better == "higher") else "bad"
    return Row(metric.label, left, right, f"{ratio:.2f}" if static else "", verdict)


def outcome(data: dict[str, Any]) -> str:
    """What got better, worse or neither, as far as both runs got."""
    shared = shared_seconds(data)
    if not shared:
        return "Nothing to compare: the two runs did not both get through the first phase."
    where = f" over the first {shared:g} s, which both runs got through" if shared < math.inf else ""
    rows = _rows(data, 0.0, shared)[:NUM_IN_OUTCOME]
    rows = [row for row in rows if NOTHING not in (row.static, row.tuned)]
    parts = []
    for verdict, words in (("good", "better"), ("bad", "worse"), ("even", f"within {100 * SAME:g} %")):
        named = [_in_words(row) for row in rows if row.verdict == verdict]
        parts += [f"{words}: {', '.join(named)}"] if named else []
    if not parts:
        return "Nothing to compare: no request was answered."
    return f"Tuned against static{where} - {'; '.join(parts)}. Each ran once: a few per cent may be chance."


def _in_words(row: Row) -> str:
    head, _, tail = row.label.partition(", ")
    name = head[0].lower() + head[1:] + (f" ({tail})" if tail else "")
    return name if row.verdict == "even" else f"{name} {row.static} \u2192 {row.tuned}"


def cut_off(run: Run) -> str:
    """How many requests have no latency because the run ended first; empty if none."""
    results = run["results"]
    cut = [result for result in results if result["status"] == "cut off"]
    if not cut:
        return ""
    silent = sum(result["ttft_seconds"] is None for result in cut)
    waits = [max(run["seconds"] - result["sent"], 0.0) for result in cut]
    span = " to ".join(dict.fromkeys(f"{wait:.0f}" for wait in (min(waits), max(waits))))
    return f"{len(cut)} of {len(results)} ({silent} before their first token), under way for {span} s by then"


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
