"""What `autotune trace info` shows: a table in the terminal, and a page of charts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvpilot.engine.files import save
from kvpilot.env.pages.figure import GRID, Figure, frame
from kvpilot.env.pages.page import render_page
from kvpilot.env.traces.summary import TraceSummary

Named = Sequence[tuple[str, TraceSummary]]
Row = tuple[str, list[str]]

COLORS = ("#1d4e89", "#c8551b", "#4f9d9d", "#f2b134", "#7a4988", "#51657d")
TABLE_SIZES = 8  # cache sizes shown in the table, at most


def rows(summaries: Named) -> list[Row]:
    """Label, and a cell per trace."""

    def row(label: str, cell: Callable[[TraceSummary], str]) -> Row:
        return label, [cell(summary) for _, summary in summaries]

    return [
        row("requests", lambda s: f"{s.requests:,}"),
        row("sessions / tenants", lambda s: f"{s.sessions:,} / {s.tenants:,}"),
        row("duration", lambda s: f"{s.duration_seconds:,.0f} s"),
        row("requests per second", lambda s: f"{s.requests_per_second:.3g}"),
        row("input tokens per second", lambda s: f"{s.input_tokens_per_second:,.0f}"),
        row("output tokens per second", lambda s: f"{s.output_tokens_per_second:,.0f}"),
        row("arrival CV (Poisson: 1)", lambda s: f"{s.arrival_cv:.2f}"),
        row("input tokens p50 / p90 / p99", lambda s: _spread(s.input_tokens)),
        row("output tokens p50 / p90 / p99", lambda s: _spread(s.output_tokens)),
        row("turns per session p50 / p90 / p99", lambda s: _spread(s.turns_per_session)),
        row("P(next turn) after 1, 2, 3, 4", lambda s: " / ".join(f"{p:.2f}" for p in s.next_turn_share[:4])),
        row("turn gap p50 / p90 / p99, s", lambda s: _spread(s.turn_gap_seconds)),
        row("block size, tokens", lambda s: f"{s.block_size}"),
        row("blocks looked up / distinct", lambda s: f"{s.blocks:,} / {s.distinct_blocks:,}"),
        row("distinct blocks used once", lambda s: f"{s.used_once_share:.2f}"),
        row("reuse interval p50 / p90 / p99, s", lambda s: _spread(s.reuse_interval_seconds)),
        row("hit rate, infinite cache", lambda s: f"{s.infinite_hit_rate:.3f}"),
        *_curve_rows(summaries),
    ]


def _curve_rows(summaries: Named) -> list[Row]:
    sizes = sorted({size for _, s in summaries for size in _shown_sizes(s)})

    def cell(summary: TraceSummary, size: int) -> str:
        if size not in summary.hit_rate_blocks:
            return "-"
        k = summary.hit_rate_blocks.index(size)
        return f"{summary.hit_rate_lru[k]:.3f} / {summary.hit_rate_optimal[k]:.3f}"

    return [(f"{size:,} blocks: LRU / optimal", [cell(s, size) for _, s in summaries]) for size in sizes]


def _shown_sizes(summary: TraceSummary) -> list[int]:
    """Where the curves move: not the sizes where both are all but flat."""
    moving = [
        size
        for size, lru, optimal in zip(
            summary.hit_rate_blocks, summary.hit_rate_lru, summary.hit_rate_optimal, strict=True
        )
        if optimal > 0.02 and lru < 0.99 * summary.infinite_hit_rate
    ]
    return moving[-TABLE_SIZES:]


def _spread(values: dict[str, float]) -> str:
    return " / ".join(_short(values[p]) for p in ("p50", "p90", "p99")) if values else "-"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def show(summaries: Named, console: Console) -> None:
    """The table; the reading of a cache curve is said under it."""
    table = Table("", *(name for name, _ in summaries))
    for column in table.columns[1:]:
        column.justify = "right"
    for label, cells in rows(summaries):
        table.add_row(label, *cells)
    console.print(table)
    console.print("Hit rates: share of the full prompt blocks; optimal knows the future.", style="dim")


# ---------------------------------------------------------------------- page
def write_page(summaries: Named, path: Path) -> None:
    """Raises KVPilotError where `path` cannot be written."""
    text = render_page(
        "kvpilot.agent.simulate",
        "trace.html.j2",
        charts=make_charts(summaries),
        names=[name for name, _ in summaries],
        rows=rows(summaries),
        provenance=[(name, s.provenance) for name, s in summaries],
    )
    save(path, text)


def make_charts(summaries: Named) -> list[Figure]:
    def over_time(key: str) -> list[dict]:
        return [
            _line(k, name, s.over_time["start_seconds"], s.over_time[key])
            for k, (name, s) in enumerate(summaries)
        ]

    def lengths(key: str) -> list[dict]:
        traces = []
        for k, (name, s) in enumerate(summaries):
            spread = getattr(s, key)
            traces.append(
                _line(k, name, list(spread.values()), [int(p[1:]) / 100 for p in spread], marked=True)
            )
        return traces

    hits, intervals, turns = [], [], []
    for k, (name, s) in enumerate(summaries):
        hits += [
            _line(k, f"{name}, LRU", s.hit_rate_blocks, s.hit_rate_lru),
            _line(k, f"{name}, optimal", s.hit_rate_blocks, s.hit_rate_optimal, dash="dash"),
        ]
        intervals.append(_line(k, name, s.reuse_interval_cdf["seconds"], s.reuse_interval_cdf["share"]))
        turns.append(
            _line(k, name, list(range(1, len(s.next_turn_share) + 1)), s.next_turn_share, marked=True)
        )
    size_note = "Blocks cached, logarithmic. The gap between the lines is what a better policy could gain."
    return [
        _chart("hits", "Hit rate over cache size", size_note, hits, "blocks", "share of blocks", log=True),
        _chart(
            "intervals",
            "Reuse intervals",
            "Share of the reused blocks whose next use comes within so long.",
            intervals,
            "seconds",
            "share",
            log=True,
        ),
        _chart(
            "requests", "Requests over time", "", over_time("requests_per_second"), "seconds", "requests/s"
        ),
        _chart("input", "Input over time", "", over_time("input_tokens_per_second"), "seconds", "tokens/s"),
        _chart(
            "output", "Output over time", "", over_time("output_tokens_per_second"), "seconds", "tokens/s"
        ),
        _chart(
            "prompts", "Prompt lengths", "Cumulative.", lengths("input_tokens"), "tokens", "share", log=True
        ),
        _chart(
            "replies", "Reply lengths", "Cumulative.", lengths("output_tokens"), "tokens", "share", log=True
        ),
        _chart("turns", "Will there be another turn?", "By turn number.", turns, "turn", "probability"),
    ]


def _line(
    index: int,
    name: str,
    x: Sequence[float],
    y: Sequence[float],
    *,
    dash: str = "solid",
    marked: bool = False,
) -> dict[str, Any]:
    line = {"color": COLORS[index % len(COLORS)], "width": 2, "dash": dash}
    mode = "lines+markers" if marked else "lines"
    return {"type": "scatter", "mode": mode, "x": list(x), "y": list(y), "name": name, "line": line}


def _chart(
    name: str, title: str, note: str, traces: list[dict], x: str, y: str, *, log: bool = False
) -> Figure:
    layout = frame(320) | {
        "xaxis": {**GRID, "title": {"text": x}, "type": "log" if log else "linear"},
        "yaxis": {**GRID, "title": {"text": y}, "rangemode": "tozero"},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        "showlegend": len(traces) > 1,
        "hovermode": "x",
    }
    return {"id": name, "title": title, "note": note, "traces": traces, "layout": layout}
