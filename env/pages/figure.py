"""How the charts of all pages look: colours, frame and axes, as plotly JSON."""

from math import ceil, floor, log10
from typing import Any

Figure = dict[str, Any]  # `id`, `title`, `note`, `traces`, `layout`

LEVEL_COLORS = {"bf16": "#1d4e89", "fp32": "#1d4e89", "int8": "#4f9d9d", "fp8": "#4f9d9d", "int4": "#f2b134"}
GRID = {"gridcolor": "#e6e6e0", "zeroline": False}  # of an axis
MAX_TICKS = 12  # more run into each other
PADDING = 0.02  # of the axis, so that dots at its ends are whole


def frame(height: int, *, top: int = 10, bottom: int = 44) -> dict[str, Any]:
    """Layout of a chart without its axes and legend; `top` and `bottom` are margins. Pixels."""
    return {
        "height": height,
        "margin": {"l": 62, "r": 14, "t": top, "b": bottom},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "#ffffff",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#2b2b2b"},
    }


def log_axis(low: float, high: float) -> dict[str, Any]:
    """Plotly settings of a logarithmic axis from the 1-2-5 tick below `low` to the one above `high`; both > 0.

    Plotly's own ticks between decades are bare digits, and absent where the data spans less than a factor of two.
    """
    exponents = range(floor(log10(low)) - 1, ceil(log10(high)) + 2)
    ticks = {float(f"{digit}e{e}"): f"{digit}e{e}" for e in exponents for digit in (1, 2, 5)}
    first = max(tick for tick in ticks if tick <= low)
    last = min(tick for tick in ticks if tick >= high and tick > first)
    shown = [tick for tick in ticks if first <= tick <= last]
    if len(shown) > MAX_TICKS:
        shown = [tick for tick in shown if ticks[tick].startswith("1")]
    start, end = log10(first), log10(last)
    room = PADDING * (end - start)
    return {
        "type": "log",
        "range": [start - room, end + room],
        "tickmode": "array",
        "tickvals": shown,
        "ticktext": [_in_full(tick) for tick in shown],
    }


def _in_full(tick: float) -> str:
    decimals = max(0, -floor(log10(tick) + 1e-9))
    return f"{tick:.{decimals}f}"
