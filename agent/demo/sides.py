"""Two runs side by side on the same axes: left the static one, right the tuned one, phases shaded in both."""

from typing import Any

from kvpilot.agent.demo.series import COLORS
from kvpilot.env.pages.figure import GRID, frame

GHOST = "rgba(90,90,90,0.7)"  # the other run, for comparison
MIN_BAND_SHARE = 0.05  # of the axis, for a band to have a name


def on(trace: dict, side: int) -> dict:
    shown = {"showlegend": False, **trace}
    return {**shown, "xaxis": "x2", "yaxis": "y2"} if side else shown


def ghost(line: dict) -> dict:
    style = {"color": GHOST, "width": 1.3, "dash": "dot"}
    return {**line, "line": style, "hoverinfo": "skip"}


def layout(data: dict[str, Any], unit: str, height: int = 300) -> dict[str, Any]:
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


def set_range(layout: dict[str, Any], span: list[float]) -> None:
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
