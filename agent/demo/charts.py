"""The report's charts as plotly JSON: left the static run, right the tuned one, on the same axes."""

from collections.abc import Callable
from typing import Any

from kvpilot.agent.demo import series, sides
from kvpilot.agent.demo.series import BIN_SECONDS, SHOWN_FROM_SECONDS, SMOOTH_SAMPLES, Run
from kvpilot.env.pages.figure import GRID, Figure, log_axis

Data = dict[str, Any]  # run.json
Words = dict[str, str]  # `id`, `title` and `note` of a chart

KNOBS = ("kv_level", "max_batch", "size_factor", "ttl_seconds")  # in the order of their rows
ROW_GAP = 0.05  # between them, of the chart's height
SMOOTH_NOTE = f"Mean over {SMOOTH_SAMPLES} s."
HIT_NOTE = f"Prompt tokens that need not be computed again. {SMOOTH_NOTE[:-1]}; gaps: nothing was looked up."
POOL_NOTE = (
    "The same bytes hold 1.9 times the tokens at int8 and 3.4 times at int4. Pages are stepped down only when memory "
    "is needed."
)
TTFT_NOTE = (
    "Each dot is a request, by the time it was sent; the line is the median over "
    f"{BIN_SECONDS:g} s. Logarithmic."
)
GAP_NOTE = (
    "Mean over each answer that ended. More requests together means a slower stream for each. Logarithmic."
)
CUT_OFF_NOTE = (
    " Triangles: cut off by the end before their first token, at the time they had waited by then. The line leaves "
    "them out: where they are many it is too low, or ends, just where the queue is longest."
)
KNOB_NOTE = (
    "Static: as the engine starts. Tuned: what the loop wrote and read back, one step at a time. Retention "
    "(size_factor, ttl_seconds) protects the pages of idle chats; kv_level allows lower precision; max_batch moves "
    "when seats are short, not memory."
)


def make_charts(data: Data) -> list[Figure]:
    """`id`, `title`, `note`, `traces` and `layout` of each chart, in reading order. `data` is run.json."""
    tokens = _words("pool-tokens", "Tokens that the pool holds, by precision", POOL_NOTE + _capacity(data))
    used = _words(
        "pool-bytes", "Pool bytes in use, by precision", "Running and cached pages, scales included."
    )
    hits = _words("hit-rate", "Prefix cache hit rate", HIT_NOTE)
    throughput = _words("throughput", "Output tokens per second", SMOOTH_NOTE)
    waiting = _words("waiting", "Requests waiting", "Not admitted yet, for want of memory or seats.")
    running = _words("running", "Requests running together", "")
    ttft = _words("ttft", "Time to first token", TTFT_NOTE + _cut_off_note(data))
    gap = _words("inter-token", "Time between two tokens", GAP_NOTE)
    charts = [
        _knob_chart(data, _words("knobs", "The four knobs", KNOB_NOTE)),
        _stack_chart(data, tokens, "tokens", "pages", data["page_size"]),
        _stack_chart(data, used, "MiB", "page_bytes", 2**-20),
        _line_chart(data, hits, "share of tokens", series.hit_rate),
        _line_chart(data, throughput, "tokens/s", series.throughput),
        _line_chart(data, waiting, "requests", series.waiting),
        _line_chart(data, running, "requests", series.running),
        _dots_chart(data, ttft, "ttft_seconds"),
        _dots_chart(data, gap, "inter_token_seconds"),
    ]
    return [chart for chart in charts if chart["traces"]]


def _words(id: str, title: str, note: str) -> Words:
    return {"id": id, "title": title, "note": note}


def _capacity(data: Data) -> str:
    full = [next(iter(sample["capacity_tokens"].values()), 0) for sample in data["runs"][0]["samples"]]
    return f" In full precision it holds {max(full):g}." if full else ""


def _cut_off_note(data: Data) -> str:
    return CUT_OFF_NOTE if any(series.cut_off(run)["x"] for run in data["runs"]) else ""


# ---------------------------------------------------------------------- kinds of charts
def _stack_chart(data: Data, words: Words, unit: str, field: str, factor: float) -> Figure:
    stacks = [series.stack(run, field, factor, unit) for run in data["runs"]]
    traces = [sides.on(trace, side) for side, stack in enumerate(stacks) for trace in stack]
    tops = [sum(values) for stack in stacks for values in zip(*(t["y"] for t in stack), strict=True)]
    layout = sides.layout(data, unit)
    sides.set_range(layout, [0.0, max(tops, default=1.0) * 1.08])
    return {**words, "traces": traces, "layout": layout}


def _line_chart(
    data: Data, words: Words, unit: str, values_of: Callable[[Run], list[float | None]]
) -> Figure:
    traces = []
    lines = [series.line(run, series.times(run), values_of(run), run["name"]) for run in data["runs"]]
    for side, line in enumerate(lines):
        others = [other for other in lines if other is not line and any(y is not None for y in other["y"])]
        traces += [sides.on(sides.ghost(other), side) for other in others]
        traces += [sides.on(line, side)] if line["x"] else []
    layout = sides.layout(data, unit)
    top = max((y for line in lines for y in line["y"] if y is not None), default=1.0)
    sides.set_range(layout, [0.0, top * 1.08 or 1.0])
    return {**words, "traces": traces, "layout": layout}


def _dots_chart(data: Data, words: Words, field: str) -> Figure:
    traces = []
    medians = [series.binned(run, field) for run in data["runs"]]
    for side, run in enumerate(data["runs"]):
        dots = series.dots(run, field)
        if dots["x"]:
            others = [other for other in medians if other is not medians[side] and other["x"]]
            traces += [sides.on(sides.ghost(other), side) for other in others]
            traces += [sides.on(dots, side), sides.on(medians[side], side)]
    if field == "ttft_seconds":
        cut_off = [series.cut_off(run) for run in data["runs"]]
        traces += [sides.on(trace, side) for side, trace in enumerate(cut_off) if trace["x"]]
    layout = sides.layout(data, "seconds")
    shown = [y for trace in traces for y in trace["y"] if y >= SHOWN_FROM_SECONDS] or [1.0]
    for axis in ("yaxis", "yaxis2"):
        layout[axis] |= log_axis(min(shown), max(shown))
    return {**words, "traces": traces, "layout": layout}


def _knob_chart(data: Data, words: Words) -> Figure:
    """A row per knob; all share the time axis. Axes are numbered row by row, left before right."""
    traces = []
    layout = {**sides.layout(data, "", height=460), "showlegend": False}
    for row, knob in enumerate(KNOBS):
        values = [v for run in data["runs"] for v in series.knob(run, knob) if v is not None]
        high = max(values, default=1.0) or 1.0
        for side, run in enumerate(data["runs"]):
            number = row * 2 + side + 1
            axis = "" if number == 1 else str(number)
            place = {"name": knob, "xaxis": "x2" if side else "x", "yaxis": f"y{axis}"}
            traces.append({**series.steps(run, knob), **place})
            layout[f"yaxis{axis}"] = _row_axis(row, side, high)
    last = len(KNOBS) * 2
    layout["xaxis"]["anchor"], layout["xaxis2"]["anchor"] = f"y{last - 1}", f"y{last}"
    return {**words, "traces": traces, "layout": layout}


def _row_axis(row: int, side: int, high: float) -> dict[str, Any]:
    """With room above the largest value; only the left one is named."""
    height = (1 - ROW_GAP * (len(KNOBS) - 1)) / len(KNOBS)
    top = 1 - row * (height + ROW_GAP)
    return {
        **GRID,
        "domain": [max(top - height, 0.0), top],
        "anchor": "x2" if side else "x",
        "title": {"text": "" if side else KNOBS[row], "font": {"size": 12}, "standoff": 8},
        "automargin": not side,
        "range": [-0.1 * high, 1.2 * high],
        "tickvals": [0, high] if high == 1 else [0, high / 2, high],
    }
