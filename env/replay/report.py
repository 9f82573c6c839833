"""One HTML page of a replay, or of several side by side, that needs nothing else."""

import math
from pathlib import Path
from typing import Any, NamedTuple

from kvpilot.engine.files import save
from kvpilot.env.pages.page import render_page
from kvpilot.env.replay.charts import Named, color_of, make_charts
from kvpilot.env.replay.compare import describe, warnings_of
from kvpilot.env.replay.result import CUT_OFF, DONE, FAILED, REFUSED, ReplayResult


class Row(NamedTuple):
    """One figure of every replay; `change` of the last against the first, `verdict` good, bad or even."""

    label: str
    values: list[str]
    change: str
    verdict: str


class _Figure(NamedTuple):
    label: str
    path: tuple[str, ...]  # into the summary
    form: str  # share, seconds, count, rate or nats
    better: str  # higher, lower or neither


FIGURES = (
    _Figure("Prefix hit rate", ("hit_rate",), "share", "higher"),
    _Figure("Good requests (within the SLO)", ("goodput_share",), "share", "higher"),
    _Figure("Time to first token, median", ("ttft_seconds", "p50"), "seconds", "lower"),
    _Figure("Time to first token, p99", ("ttft_seconds", "p99"), "seconds", "lower"),
    _Figure("Between two tokens, median", ("inter_token_seconds", "p50"), "seconds", "lower"),
    _Figure("Between two tokens, p99", ("inter_token_seconds", "p99"), "seconds", "lower"),
    _Figure("Whole answer, mean", ("e2e_seconds", "mean"), "seconds", "lower"),
    _Figure("Whole answer, p99", ("e2e_seconds", "p99"), "seconds", "lower"),
    _Figure("Wait for admission, p99", ("queue_seconds", "p99"), "seconds", "lower"),
    _Figure("Requests refused", ("status", REFUSED), "count", "lower"),
    _Figure("Requests failed", ("status", FAILED), "count", "lower"),
    _Figure("Requests cut off", ("status", CUT_OFF), "count", "lower"),
    _Figure("Good requests per second", ("goodput_per_second",), "rate", "higher"),
    _Figure("Requests answered per second", ("requests_per_second",), "rate", "higher"),
    _Figure("Output tokens per second", ("output_tokens_per_second",), "rate", "higher"),
    _Figure("Preemptions", ("preemptions",), "count", "lower"),
    _Figure("Pages evicted, unprotected", ("evictions", "unprotected"), "count", "neither"),
    _Figure("Pages evicted, retained: growth", ("evictions", "growth"), "count", "neither"),
    _Figure("Pages evicted, retained: starving request", ("evictions", "starving"), "count", "neither"),
    _Figure("Pages evicted, retained: idle engine", ("evictions", "idle_engine"), "count", "neither"),
    _Figure("Pages stepped down to int8", ("stepped_down", "int8"), "count", "neither"),
    _Figure("Pages stepped down to int4", ("stepped_down", "int4"), "count", "neither"),
    _Figure("Quality loss, mean KL per token", ("quality_loss",), "nats", "lower"),
)  # fmt: skip
NUM_TILES = 8
SAME = 0.02  # relative change that nobody should read anything into


def write_report(results: list[Named], path: Path) -> None:
    """`results` are named; more than one is a comparison of each with the first. Raises KVPilotError."""
    save(path, render(results))


def render(results: list[Named]) -> str:
    """The page."""
    rows = figure_rows([result for _, result in results])
    return render_page(
        "kvpilot.env.replay",
        "report.html.j2",
        charts=make_charts(results),
        results=results,
        colors=[color_of(number) for number in range(len(results))],
        rows=rows,
        tiles=rows[:NUM_TILES],
        settings=setting_rows(results),
        unanswered=unanswered,
        change=change_title(len(results)),
        describe=describe,
        warnings=warnings_of(results),
        seconds=format_seconds,
    )


def figure_rows(results: list[ReplayResult]) -> list[Row]:
    """The figures that at least one replay has."""
    rows = []
    for figure in FIGURES:
        values = [_lookup(result.summary, figure.path) for result in results]
        if any(value if figure.path[0] == "status" else value is not None for value in values):
            shown = [format_value(value, figure.form) for value in values]
            if figure.path == ("quality_loss",):
                shown = [text + _why_no_loss(result) for text, result in zip(shown, results, strict=True)]
            rows.append(Row(figure.label, shown, *_compare(values, figure.better)))
    return rows


def unanswered(result: ReplayResult) -> list[str]:
    """A line for each status but done: how many of all, and why where that is known."""
    summary, lines = result.summary, []
    for status, count in summary["status"].items():
        if status != DONE:
            reasons = summary.get("reasons", {}).get(status, {})
            why = ", ".join(f"{number:,} {reason}" for reason, number in reasons.items())
            lines.append(f"{status} {count:,} of {summary['requests']:,}" + (f": {why}" if why else ""))
    return lines


def change_title(num_results: int) -> str:
    return "change" if num_results == 2 else "change, first to last"


def setting_rows(results: list[Named]) -> list[tuple[str, list[str]]]:
    """Envelope and knobs of simulated replays."""
    flat = [_flatten(result.config) for _, result in results]
    names = dict.fromkeys(name for settings in flat for name in settings)
    return [(name, [str(settings.get(name, "-")) for settings in flat]) for name in names]


def _flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict) and name != "origin":
            flat |= _flatten(value, f"{prefix}{name}.")
        elif value is not None and not isinstance(value, dict):
            flat[prefix + name] = value
    return flat


def _lookup(summary: dict[str, Any], path: tuple[str, ...]) -> float | None:
    if path[0] == "status":  # a status that no request has is not listed
        return summary.get("status", {}).get(path[1], 0)
    value: Any = summary
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return None if value is None or math.isnan(value) else value


def _why_no_loss(result: ReplayResult) -> str:
    """No loss beside many pages stepped down looks like an error."""
    stepped_down = result.summary.get("stepped_down", {})
    reads = [row.get(level, 0) for row in result.windows.get("pages_read", []) for level in stepped_down]
    unread = result.summary.get("quality_loss") == 0 and any(stepped_down.values()) and reads
    return ": no stepped-down page was read" if unread and not any(reads) else ""


def _compare(values: list[float | None], better: str) -> tuple[str, str]:
    first, last = values[0], values[-1]
    if len(values) < 2 or first is None or last is None:
        return "", "even"
    if first == 0:
        return ("" if last == 0 else "from 0"), "even"
    ratio = last / first
    rises = ratio > 1 + SAME
    verdict = (
        "even"
        if better == "neither" or abs(ratio - 1) <= SAME
        else "good"
        if rises == (better == "higher")
        else "bad"
    )
    return f"{100 * (ratio - 1):+.0f} %", verdict


def format_value(value: float | None, form: str) -> str:
    if value is None:
        return "-"
    match form:
        case "share":
            return f"{100 * value:.1f} %"
        case "seconds":
            return format_seconds(value)
        case "count":
            return f"{value:,.0f}"
        case "rate":
            return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
        case _:
            return f"{value:.2g}"


def format_seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 600 else f"{seconds / 60:.3g} min"
