"""The report's charts as plotly JSON: left the static run, right the tuned one, on the same axes."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from kvpilot.env.pages.figure import GRID, LEVEL_COLORS, Figure, frame, log_axis

Run = dict[str, Any]  # one entry of run.json's `runs`

COLORS = {"static": "#51657d", "tuned": "#c8551b"}
GHOST = "rgba(90,90,90,0.7)"  # the other run, for comparison
SMOOTH_SAMPLES = 5
BIN_SECONDS = 3.0
MIN_BAND_SHARE = 0.05  # of the axis, for a band to have a name
SHOWN_FROM_SECONDS = 0.002  # below: the reader was late and read several tokens at once
KNOB_LABELS = {
    "kv_level": "kv_level",
    "max_batch": "max_batch",
    "size_factor": "size_factor",
    "ttl_seconds": "ttl_seconds",
}


def make_charts(data: dict[str, Any]) -> list[Figure]:
    """`id`, `title`, `note`, `traces` and `layout` of each chart, in reading order. `data` is run.json."""
    page_size = data["page_size"]

    def pages_as_tokens(run: Run) -> list[dict]:
        return _stack(run, "pages", page_size, "tokens")

    def capacity(run: Run) -> str:
        full = [next(iter(s["capacity_tokens"].values()), 0) for s in run["samples"]]
        return f" In full precision it holds {max(full):g}." if full else ""

    def bytes_as_mib(run: Run) -> list[dict]:
        return _stack(run, "page_bytes", 2**-20, "MiB")

    charts = [
        _knob_chart(data),
        _chart(
            data,
            "pool-tokens",
            "Tokens that the pool holds, by precision",
            "The same bytes hold 1.9 times the tokens at int8 and 3.4 times at int4. Pages are stepped down only "
            f"when memory is needed.{capacity(data['runs'][0])}",
            "tokens",
            pages_as_tokens,
        ),
        _chart(
            data,
            "pool-bytes",
            "Pool bytes in use, by precision",
            "Running and cached pages, scales included.",
            "MiB",
            bytes_as_mib,
        ),
        _line_chart(data, "hit-rate", "Prefix cache hit rate", f"{HIT_NOTE}", "share of tokens", _hit_rate),
        _line_chart(data, "throughput", "Output tokens per second", SMOOTH_NOTE, "tokens/s", _throughput),
        _line_chart(
            data, "waiting", "Requests waiting", "Not admitted yet, for want of memory or seats.", "requests", _waiting
        ),
        _line_chart(data, "running", "Requests running together", "", "requests", _running),
        _dots_chart(
            data, "ttft", "Time to first token", "Each dot is a request, by the time it was sent; the line is the "
            f"median over {BIN_SECONDS:g} s. Logarithmic.{_cut_off_note(data)}", "ttft_seconds"
        ),
        _dots_chart(
            data, "inter-token", "Time between two tokens", "Mean over each answer that ended. More requests "
            "together means a slower stream for each. Logarithmic.", "inter_token_seconds"
        ),
    ]  # fmt: skip
    return [chart for chart in charts if chart["traces"]]


SMOOTH_NOTE = f"Mean over {SMOOTH_SAMPLES} s."
HIT_NOTE = f"Prompt tokens that need not be computed again. Mean over {SMOOTH_SAMPLES} s; gaps: nothing was looked up."


# ---------------------------------------------------------------------- kinds of charts
def _chart(
    data: dict[str, Any], name: str, title: str, note: str, unit: str, traces_of: Callable[[Run], list[dict]]
) -> Figure:
    traces = []
    for side, run in enumerate(data["runs"]):
        traces += [_on(trace, side) for trace in traces_of(run)]
    tops = [
        sum(values) for run in data["runs"] for values in zip(*(t["y"] for t in traces_of(run)), strict=True)
    ]
    layout = _layout(data, unit)
    _set_range(layout, [0.0, max(tops, default=1.0) * 1.08])
    return {"id": name, "title": title, "note": note, "traces": traces, "layout": layout}


def _line_chart(
    data: dict[str, Any],
    name: str,
    title: str,
    note: str,
    unit: str,
    series: Callable[[Run], list[float | None]],
) -> Figure:
    traces = []
    lines = [_line(run, series(run)) for run in data["runs"]]
    for side, line in enumerate(lines):
        others = [other for other in lines if other is not line and any(y is not None for y in other["y"])]
        traces += [_on(_ghost(other), side) for other in others]
        traces += [_on(line, side)] if line["x"] else []
    layout = _layout(data, unit)
    top = max((y for line in lines for y in line["y"] if y is not None), default=1.0)
    _set_range(layout, [0.0, top * 1.08 or 1.0])
    return {"id": name, "title": title, "note": note, "traces": traces, "layout": layout}


def _dots_chart(data: dict[str, Any], name: str, title: str, note: str, field: str) -> Figure:
    traces = []
    medians = [_binned(run, field) for run in data["runs"]]
    for side, run in enumerate(data["runs"]):
        color = COLORS[run["name"]]
        dots = [(r["sent"], r[field]) for r in run["results"] if r[field]]
        if not dots:
            continue
        marker = {"size": 5, "color": color, "opacity": 0.35}
        x, y = [round(t, 2) for t, _ in dots], [round(value, 6) for _, value in dots]
        trace = {"type": "scatter", "mode": "markers", "x": x, "y": y, "marker": marker, "name": "requests"}
        traces += [_on(_ghost(other), side) for other in medians if other is not medians[side] and other["x"]]
        traces += [_on(trace, side), _on(medians[side], side)]
    if field == "ttft_seconds":
        traces += [_on(_cut_off(run), side) for side, run in enumerate(data["runs"]) if _cut_off(run)["x"]]
    layout = _layout(data, "seconds")
    shown = [y for trace in traces for y in trace["y"] if y >= SHOWN_FROM_SECONDS] or [1.0]
    for axis in ("yaxis", "yaxis2"):
        layout[axis] |= log_axis(min(shown), max(shown))
    return {"id": name, "title": title, "note": note, "traces": traces, "layout": layout}


def _knob_chart(data: dict[str, Any]) -> Figure:
    """Four rows that share the time axis."""
    traces = []
    layout = _layout(data, "", height=460)
    layout["showlegend"] = False
    gap, names = 0.05, list(KNOB_LABELS)
    height = (1 - gap * (len(names) - 1)) / len(names)
    for row, name in enumerate(names):
        top = 1 - row * (height + gap)
        values = [v for run in data["runs"] for v in _knob(run, name) if v is not None]
        high = max(values, default=1.0) or 1.0
        for side, run in enumerate(data["runs"]):
            number = row * 2 + side + 1
            axis = f"y{'' if number == 1 else number}"
            line = {"shape": "hv", "color": COLORS[run["name"]], "width": 2.5}
            trace = {
                "type": "scatter",
                "mode": "lines",
                "x": _times(run),
                "y": _knob(run, name),
                "line": line,
            }
            traces.append({**trace, "name": name, "xaxis": "x" if side == 0 else "x2", "yaxis": axis})
            layout[f"yaxis{axis[1:]}"] = {
                "domain": [max(top - height, 0.0), top],
                "anchor": "x" if side == 0 else "x2",
                "title": {
                    "text": KNOB_LABELS[name] if side == 0 else "",
                    "font": {"size": 12},
                    "standoff": 8,
                },
                "automargin": side == 0,
                "range": [-0.1 * high, 1.2 * high],
                "tickvals": [0, high] if high == 1 else [0, high / 2, high],
                "gridcolor": "#e6e6e0",
                "zeroline": False,
            }
    last = len(names) * 2
    layout["xaxis"]["anchor"], layout["xaxis2"]["anchor"] = f"y{last - 1}", f"y{last}"
    note = (
        "Static: as the engine starts. Tuned: what the loop wrote and read back, one step at a time. Retention "
        "(size_factor, ttl_seconds) protects the pages of idle chats; kv_level allows lower precision; max_batch moves "
        "when seats are short, not memory."
    )
    return {"id": "knobs", "title": "The four knobs", "note": note, "traces": traces, "layout": layout}


# ---------------------------------------------------------------------- series
def _times(run: Run) -> list[float]:
    return [round(sample["t"], 2) for sample in run["samples"]]


def _knob(run: Run, name: str) -> list[float | None]:
    return [sample["knobs"][name] for sample in run["samples"]]


def _recent(run: Run) -> list[list[dict]]:
    """For each sample, it and the ones just before."""
    samples = run["samples"]
    return [samples[max(0, i - SMOOTH_SAMPLES + 1) : i + 1] for i in range(len(samples))]


def _total(samples: Sequence[dict], name: str) -> float:
    return sum(sample[name] for sample in samples)


def _hit_rate(run: Run) -> list[float | None]:
    totals = [(_total(part, "hit_tokens"), _total(part, "query_tokens")) for part in _recent(run)]
    return [round(hits / queries, 4) if queries else None for hits, queries in totals]


def _throughput(run: Run) -> list[float | None]:
    return [round(_total(part, "generation_tokens") / _total(part, "seconds"), 2) for part in _recent(run)]


def _waiting(run: Run) -> list[float | None]:
    return [sample["waiting"] for sample in run["samples"]]


def _running(run: Run) -> list[float | None]:
    return [sample["running"] for sample in run["samples"]]


def _line(run: Run, values: list[float | None]) -> dict:
    line = {"color": COLORS[run["name"]], "width": 2.5}
    return {
        "type": "scatter",
        "mode": "lines",
        "x": _times(run),
        "y": values,
        "line": line,
        "name": run["name"],
    }


def _binned(run: Run, field: str) -> dict:
    bins: dict[int, list[float]] = {}
    for result in run["results"]:
        if result[field]:
            bins.setdefault(int(result["sent"] // BIN_SECONDS), []).append(result[field])
    x = [(index + 0.5) * BIN_SECONDS for index in sorted(bins)]
    y = [round(median(bins[index]), 6) for index in sorted(bins)]
    line = {"color": COLORS[run["name"]], "width": 2.5}
    return {
        "type": "scatter",
        "mode": "lines",
        "x": x,
        "y": y,
        "line": line,
        "name": f"{run['name']}, median",
    }


def _cut_off(run: Run) -> dict:
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


def _cut_off_note(data: dict[str, Any]) -> str:
    if not any(_cut_off(run)["x"] for run in data["runs"]):
        return ""
    return (
        " Triangles: cut off by the end before their first token, at the time they had waited by then. The line leaves "
        "them out: where they are many it is too low, or ends, just where the queue is longest."
    )


def _stack(run: Run, field: str, factor: float, unit: str) -> list[dict]:
    levels = list(dict.fromkeys(level for sample in run["samples"] for level in sample[field]))
    levels.sort(key=list(LEVEL_COLORS).index)
    traces = []
    for level in levels:
        y = [round(sample[field].get(level, 0) * factor, 2) for sample in run["samples"]]
        style = {"fillcolor": LEVEL_COLORS[level], "line": {"width": 0}, "stackgroup": run["name"]}
        hover = f"%{{y}} {unit} at {level}<extra></extra>"
        trace = {"type": "scatter", "x": _times(run), "y": y, "name": level, "hovertemplate": hover, **style}
        traces.append({**trace, "legendgroup": level, "showlegend": run["name"] == "static"})
    return traces


# ---------------------------------------------------------------------- placing
def _on(trace: dict, side: int) -> dict:
    shown = {"showlegend": False, **trace}
    return {**shown, "xaxis": "x2", "yaxis": "y2"} if side else shown


def _ghost(line: dict) -> dict:
    style = {"color": GHOST, "width": 1.3, "dash": "dot"}
    return {**line, "line": style, "hoverinfo": "skip"}


def _layout(data: dict[str, Any], unit: str, height: int = 300) -> dict[str, Any]:
    seconds = data["config"]["seconds_per_phase"]
    end = max(len(data["phases"]) * seconds, *(run["seconds"] for run in data["runs"]))
    x = {**GRID, "range": [0, end], "title": {"text": "seconds"}, "gridcolor": "#eeeeea"}
    shapes, labels = _shading(data, seconds, end)
    return frame(height, top=42) | {
        "xaxis": {**x, "domain": [0, 0.485]},
        "xaxis2": {**x, "domain": [0.515, 1], "matches": "x"},
        "yaxis": {**GRID, "title": {"text": unit, "standoff": 8}, "automargin": True},
        "yaxis2": {**GRID, "anchor": "x2", "showticklabels": False},
        "shapes": shapes,
        "annotations": labels,
        "legend": {"orientation": "h", "x": 1, "xanchor": "right", "y": 1.24},
        "hovermode": "x",
    }


def _set_range(layout: dict[str, Any], span: list[float]) -> None:
    """The same on both sides."""
    for axis in ("yaxis", "yaxis2"):
        layout[axis]["range"] = span


def _shading(data: dict[str, Any], seconds: float, end: float) -> tuple[list[dict], list[dict]]:
    """Phases in their colours, and what follows them in white."""
    shapes, labels = [], []
    last = len(data["phases"]) * seconds
    bands = [(phase["name"], i * seconds, (i + 1) * seconds) for i, phase in enumerate(data["phases"])]
    bands += [("drain", last, end)] if end - last > MIN_BAND_SHARE * end else []
    for side, run in enumerate(data["runs"]):
        axis = "x2" if side else "x"
        for phase, (_, start, stop) in zip(data["phases"], bands, strict=False):
            span = {"x0": start, "x1": stop, "y0": 0, "y1": 1, "yref": "paper"}
            look = {"fillcolor": phase["color"], "line": {"width": 0}, "layer": "below"}
            shapes.append({"type": "rect", "xref": axis, **span, **look})
        for name, start, stop in bands:
            place = {"x": (start + stop) / 2, "y": 1, "xref": axis, "yref": "paper", "yanchor": "bottom"}
            font = {"size": 10, "color": "#6b6b63"}
            labels.append({"text": name, "showarrow": False, "font": font, **place})
        title = {"x": 0.515 * side, "y": 1, "yshift": 17, "xref": "paper", "yref": "paper", "xanchor": "left"}
        font = {"size": 13, "color": COLORS[run["name"]]}
        text = {"text": f"<b>{run['name']}</b>", "yanchor": "bottom", "showarrow": False, "font": font}
        labels.append({**title, **text})
    return shapes, labels
