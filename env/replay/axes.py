"""Axes that both kinds of report share."""

from math import ceil, floor, log10
from typing import Any

MAX_TICKS = 12  # more run into each other
PADDING = 0.02  # of the axis, so that dots at its ends are whole


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
