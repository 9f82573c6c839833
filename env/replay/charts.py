"""The charts of a replay, as plotly JSON; several replays share axes and have a colour each."""

from colorsys import hls_to_rgb
from itertools import zip_longest
from statistics import median
from typing import Any

import numpy as np

from kvpilot.env.pages.figure import GRID, LEVEL_COLORS, Figure, frame, log_axis
from kvpilot.env.replay.result import ReplayResult

Named = tuple[str, ReplayResult]

COLORS = ("#1d4e89", "#c8551b", "#3c8d5a", "#7d4f9e", "#b3261e", "#1b9aaa", "#8a6d1d", "#d0468c")
GOLDEN = 0.618034  # of a turn: hues far from all before
STATE_COLORS = {"live": "#1d4e89", "retained": "#4f9d9d", "unprotected": "#c9c9bd"}
CAUSE_COLORS = {
    "unprotected": "#c9c9bd",
    "idle_engine": "#4f9d9d",
    "growth": "#f2b134",
    "starving": "#b3261e",
}
DOTS_NOTE = "Each dot is a request at its arrival; the line is the median. Logarithmic."
HIT_NOTE = "Of the prompt tokens looked up. Gaps: nothing was looked up."
END_NOTE = "At the end of each window."
GIB = 2.0**30
MEDIAN_BINS = 60
CDF_POINTS = 200


def color_of(number: int) -> str:
    """Of the replay of this number, from 0: no two are equal."""
    if number < len(COLORS):
        return COLORS[number]
    turn = number - len(COLORS)
    channels = hls_to_rgb(turn * GOLDEN % 1.0, 0.3 + 0.1 * (turn % 3), 0.55)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)


def make_charts(results: list[Named]) -> list[Figure]:
    """`id`, `title`, `note`, `traces`, `layout`; only charts that have something to show."""
    charts = [
        _dots(results, "ttft_seconds", "Time to first token", DOTS_NOTE),
        _dots(
            results, "inter_token_seconds", "Time between two tokens", f"Mean over each answer. {DOTS_NOTE}"
        ),
        _cdf(results, "ttft_seconds", "Share of requests whose first token came within", "ttft-cdf"),
        _cdf(results, "e2e_seconds", "Share of requests answered within", "e2e-cdf"),
        _lines(results, "hit-rate", "Prefix cache hit rate", HIT_NOTE, "share", lambda w: w["hit_rate"]),
        _lines(
            results, "throughput", "Tokens generated", "", "tokens/s", lambda w: _rate(w, "generated_tokens")
        ),
        _lines(results, "waiting", "Requests waiting", END_NOTE, "requests", lambda w: w["waiting"]),
        _lines(results, "running", "Requests running together", END_NOTE, "requests", lambda w: w["running"]),
    ]
    single = [_of_one(named, k, with_name=len(results) > 1) for k, named in enumerate(results)]
    for side_by_side in zip_longest(*single):  # the same kind of several replays, then the next kind
        charts += [chart for chart in side_by_side if chart]
    return [chart for chart in charts if chart["traces"]]


def _of_one(named: Named, number: int, *, with_name: bool) -> list[Figure]:
    """What several replays cannot share an axis for."""
    name, result = named
    suffix, windows = f": {name}" if with_name else "", result.windows
    if not windows:
        return []
    by_state = {
        state: [sum(row[state].values()) / GIB for row in windows["pool_bytes"]] for state in STATE_COLORS
    }
    levels = list(dict.fromkeys(level for row in windows["pool_bytes"] for level in row["live"]))
    by_level = {
        level: [
            sum(row[state].get(level, 0) for state in STATE_COLORS) / GIB for row in windows["pool_bytes"]
        ]
        for level in levels
    }
    causes = {cause: [row[cause] for row in windows["evictions"]] for cause in CAUSE_COLORS}
    note = "Live: in use. Retained: idle and protected from release. Unprotected: idle, released when memory is needed."
    charts = [
        _stack(windows, by_state, STATE_COLORS, f"state-{number}", f"Pool by state{suffix}", note, "GiB"),
        _stack(windows, by_level, LEVEL_COLORS, f"level-{number}", f"Pool by precision{suffix}", "", "GiB"),
        _bars(windows, causes, f"evictions-{number}", f"Pages evicted, by cause{suffix}"),
    ]
    knobs = windows["knobs"]
    for knob in knobs[0]:
        values = [row[knob] for row in knobs]
        if len(set(values)) > 1:
            line = {"shape": "hv", "color": color_of(number), "width": 2}
            trace = {
                "type": "scatter",
                "mode": "lines",
                "x": windows["end_seconds"],
                "y": values,
                "line": line,
            }
            charts.append(_figure(f"{knob}-{number}", f"Knob {knob}{suffix}", "", [trace], ""))
    return charts


# ---------------------------------------------------------------------- kinds of charts
def _dots(results: list[Named], field: str, title: str, note: str) -> Figure:
    traces, shown = [], []
    for k, (name, result) in enumerate(results):
        color, columns = color_of(k), result.requests
        points = [
            (at, value)
            for at, value in zip(columns["arrival_seconds"], columns[field], strict=True)
            if value is not None and value > 0
        ]
        if not points:
            continue
        x, y = [round(at, 2) for at, _ in points], [float(f"{value:.5g}") for _, value in points]
        shown += y
        marker = {"size": 4, "color": color, "opacity": 0.3}
        traces.append(
            {"type": "scattergl", "mode": "markers", "x": x, "y": y, "marker": marker, "showlegend": False}
        )
        line = {"color": color, "width": 2.5}
        middle = _medians(points)
        traces.append({"type": "scatter", "mode": "lines", **middle, "line": line, "name": f"{name}, median"})
    figure = _figure(field.replace("_", "-"), title, note, traces, "seconds")
    if shown:
        figure["layout"]["yaxis"] |= log_axis(min(shown), max(shown))
    return figure


def _medians(points: list[tuple[float, float]]) -> dict[str, list[float]]:
    last = max(at for at, _ in points) or 1.0
    bins: dict[int, list[float]] = {}
    for at, value in points:
        bins.setdefault(int(at / last * MEDIAN_BINS * 0.9999), []).append(value)
    x = [round((index + 0.5) * last / MEDIAN_BINS, 2) for index in sorted(bins)]
    return {"x": x, "y": [float(f"{median(bins[index]):.5g}") for index in sorted(bins)]}


def _cdf(results: list[Named], field: str, title: str, name: str) -> Figure:
    traces, shown = [], []
    for k, (label, result) in enumerate(results):
        values = [v for v in result.requests[field] if v is not None]
        if not values:
            continue
        shares = np.linspace(0, 1, CDF_POINTS)
        x = [float(f"{v:.5g}") for v in np.quantile(values, shares)]
        shown += [v for v in x if v > 0]
        line = {"color": color_of(k), "width": 2.5}
        trace = {"type": "scatter", "mode": "lines", "x": x, "y": shares.round(4).tolist(), "line": line}
        traces.append({**trace, "name": label})
    figure = _figure(name, title, "Of those that were answered. Logarithmic.", traces, "")
    if shown:
        figure["layout"]["xaxis"] |= log_axis(min(shown), max(shown))
    return figure


def _lines(results: list[Named], name: str, title: str, note: str, unit: str, series: Any) -> Figure:
    traces = []
    for k, (label, result) in enumerate(results):
        if not result.windows:
            continue
        line = {"color": color_of(k), "width": 2}
        x, y = result.windows["end_seconds"], _known(series(result.windows))
        traces.append({"type": "scatter", "mode": "lines", "x": x, "y": y, "line": line, "name": label})
    figure = _figure(name, title, note, traces, unit)
    figure["layout"]["yaxis"]["rangemode"] = "tozero"
    return figure


def _stack(
    windows: dict[str, list[Any]],
    series: dict[str, list[float]],
    colors: dict[str, str],
    name: str,
    title: str,
    note: str,
    unit: str,
) -> Figure:
    traces = [
        {"type": "scatter", "x": windows["end_seconds"], "y": [round(v, 4) for v in values], "name": label,
         "fillcolor": colors[label], "line": {"width": 0}, "stackgroup": "one"}
        for label, values in series.items() if any(values)
    ]  # fmt: skip
    return _figure(name, title, note, traces, unit)


def _bars(windows: dict[str, list[Any]], series: dict[str, list[float]], name: str, title: str) -> Figure:
    traces = [
        {
            "type": "bar",
            "x": windows["end_seconds"],
            "y": values,
            "name": label,
            "marker": {"color": CAUSE_COLORS[label]},
        }
        for label, values in series.items()
        if any(values)
    ]
    figure = _figure(name, title, "Pages released per window.", traces, "pages")
    figure["layout"] |= {"barmode": "stack", "bargap": 0}
    return figure


def _figure(name: str, title: str, note: str, traces: list[dict[str, Any]], unit: str) -> Figure:
    layout = frame(280, bottom=40) | {
        "xaxis": {**GRID, "title": {"text": "seconds"}, "gridcolor": "#eeeeea"},
        "yaxis": {**GRID, "title": {"text": unit, "standoff": 8}, "automargin": True},
        "legend": {"orientation": "h", "x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom"},
        "showlegend": sum("name" in trace for trace in traces) > 1,
    }
    return {"id": name, "title": title, "note": note, "traces": traces, "layout": layout}


def _rate(windows: dict[str, list[Any]], column: str) -> list[float]:
    return [round(n / s, 3) for n, s in zip(windows[column], windows["seconds"], strict=True)]


def _known(values: list[Any]) -> list[float | None]:
    return [None if v is None or v != v else float(f"{v:.6g}") for v in values]
