"""What the report's charts draw of one run, as plotly traces and the values in them."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from kvpilot.env.pages.figure import LEVEL_COLORS

Run = dict[str, Any]  # one entry of run.json's `runs`

COLORS = {"static": "#51657d", "tuned": "#c8551b"}
SMOOTH_SAMPLES = 5
BIN_SECONDS = 3.0
SHOWN_FROM_SECONDS = 0.002  # below: the reader was late and read several tokens at once


def times(run: Run) -> list[float]:
    return [round(sample["t"], 2) for sample in run["samples"]]


def knob(run: Run, name: str) -> list[float | None]:
    return [sample["knobs"][name] for sample in run["samples"]]


def _recent(run: Run) -> list[list[dict]]:
    """For each sample, it and the ones just before."""
    samples = run["samples"]
    return [samples[max(0, i - SMOOTH_SAMPLES + 1) : i + 1] for i in range(len(samples))]


def _total(samples: Sequence[dict], name: str) -> float:
    return sum(sample[name] for sample in samples)


def hit_rate(run: Run) -> list[float | None]:
    totals = [(_total(part, "hit_tokens"), _total(part, "query_tokens")) for part in _recent(run)]
    return [round(hits / queries, 4) if queries else None for hits, queries in totals]


def throughput(run: Run) -> list[float | None]:
    return [round(_total(part, "generation_tokens") / _total(part, "seconds"), 2) for part in _recent(run)]


def waiting(run: Run) -> list[float | None]:
    return [sample["waiting"] for sample in run["samples"]]


def running(run: Run) -> list[float | None]:
    return [sample["running"] for sample in run["samples"]]


def line(run: Run, x: Sequence[float], y: Sequence[float | None], name: str) -> dict:
    style = {"color": COLORS[run["name"]], "width": 2.5}
    return {"type": "scatter", "mode": "lines", "x": x, "y": y, "line": style, "name": name}


def binned(run: Run, field: str) -> dict:
    bins: dict[int, list[float]] = {}
    for result in run["results"]:
        if result[field]:
            bins.setdefault(int(result["sent"] // BIN_SECONDS), []).append(result[field])
    x = [(index + 0.5) * BIN_SECONDS for index in sorted(bins)]
    return line(run, x, [round(median(bins[index]), 6) for index in sorted(bins)], f"{run['name']}, median")


def dots(run: Run, field: str) -> dict:
    """A dot per request that has the figure, by the time it was sent."""
    shown = [(result["sent"], result[field]) for result in run["results"] if result[field]]
    x, y = [round(t, 2) for t, _ in shown], [round(value, 6) for _, value in shown]
    marker = {"size": 5, "color": COLORS[run["name"]], "opacity": 0.35}
    return {"type": "scatter", "mode": "markers", "x": x, "y": y, "marker": marker, "name": "requests"}


def steps(run: Run, knob_name: str) -> dict:
    """A knob's value over time."""
    trace = line(run, times(run), knob(run, knob_name), knob_name)
    return {**trace, "line": {"shape": "hv", **trace["line"]}}


def cut_off(run: Run) -> dict:
    """Requests that waited for their first token when the run ended, at the time they had waited."""
    sent = [r["sent"] for r in run["results"] if r["status"] == "cut off" and r["ttft_seconds"] is None]
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [round(t, 2) for t in sent],
        "y": [round(max(run["seconds"] - t, SHOWN_FROM_SECONDS), 3) for t in sent],
        "marker": {"size": 7, "symbol": "triangle-up-open", "color": COLORS[run["name"]]},
        "name": "cut off, waited longer",
    }


def stack(run: Run, field: str, factor: float, unit: str) -> list[dict]:
    levels = list(dict.fromkeys(level for sample in run["samples"] for level in sample[field]))
    levels.sort(key=list(LEVEL_COLORS).index)
    traces = []
    for level in levels:
        y = [round(sample[field].get(level, 0) * factor, 2) for sample in run["samples"]]
        style = {"fillcolor": LEVEL_COLORS[level], "line": {"width": 0}, "stackgroup": run["name"]}
        hover = f"%{{y}} {unit} at {level}<extra></extra>"
        trace = {"type": "scatter", "x": times(run), "y": y, "name": level, "hovertemplate": hover, **style}
        traces.append({**trace, "legendgroup": level, "showlegend": run["name"] == "static"})
    return traces
