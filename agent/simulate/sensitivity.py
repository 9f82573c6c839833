"""`autotune sensitivity`: runs the sweeps, shows the table, writes JSON and plots."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plotly.subplots import make_subplots
from rich.console import Console
from rich.table import Table

from kvpilot.agent.interrupt import interruptible
from kvpilot.agent.progress import progress_bar
from kvpilot.agent.provenance import command_line
from kvpilot.agent.simulate.sweeps import METRICS, MOVES, Sensitivity, grid_of, sweep
from kvpilot.engine.config import KNOB_NAMES
from kvpilot.engine.files import save
from kvpilot.env.replay.report import format_seconds
from kvpilot.env.replay.sim import SimReplay
from kvpilot.env.traces.trace import Trace

PLOTTED = ("hit rate", "TTFT p99", "inter-token p99", "goodput", "quality loss", "evictions")
PARTIAL = "Partial: stopped before the end of the sweeps."
IN_SECONDS = ("TTFT p50", "TTFT p99", "inter-token p99", "answer mean")


@dataclass(frozen=True, kw_only=True)
class SensitivityConfig:
    replay: SimReplay
    out: Path
    at: dict[str, float] | None
    rounds: int
    quality_weight: float
    processes: int


def run_sensitivity(trace: Trace, config: SensitivityConfig) -> int:
    """Returns the exit code: 130 if it was interrupted; what was done is shown and written all the same."""
    console = Console()
    rounds = 1 if config.at is not None else config.rounds
    total = rounds * sum(len(grid_of(knob, config.replay.engine)) for knob in KNOB_NAMES)
    with interruptible() as is_stopped, progress_bar("simulating", total, console) as advance:
        result = sweep(
            trace,
            config.replay,
            at=config.at,
            rounds=config.rounds,
            quality_weight=config.quality_weight,
            processes=config.processes,
            progress=lambda done, _: advance(done),
            is_stopped=is_stopped,
        )
        interrupted = is_stopped()
    console.print(table(result, _regime(trace, config)))
    console.print("swept around " + ", ".join(f"{name}={value:g}" for name, value in result.best.items()))
    if result.is_partial:
        console.print(f"[yellow]{PARTIAL}[/]")
    console.print(verdict(result))
    _write(result, trace, config)
    console.print(f"{config.out} and {config.out.with_suffix('.html')}")
    return 130 if interrupted else 0


def _regime(trace: Trace, config: SensitivityConfig) -> str:
    replay = config.replay
    pool = f"{replay.engine.pool_bytes / 2**30:.3g} GiB of KV pool on {replay.profile.name}"
    if replay.users is not None:
        return f"{replay.users} users in closed loop, {pool}"
    rate = float(trace.prompt_tokens.sum()) / max(trace.duration_seconds, 1.0)
    return f"{len(trace)} requests, {rate:,.0f} prompt tokens/s, {pool}"


def table(result: Sensitivity, regime: str) -> Table:
    """Per metric and knob the range over the sweep; bold, and as a share of the highest, where it moves."""
    heads = [_head(result, knob) for knob in result.sweeps]
    shown = Table("", *heads, title=f"{_mark(result)}Lowest to highest as each knob alone is swept: {regime}")
    for label in METRICS:
        cells = []
        for knob in result.sweeps:
            low, high, change = result.movement(knob, label)
            text = f"{_format(label, low)} - {_format(label, high)}" if change else _format(label, high)
            moves = change > MOVES and knob not in result.unfinished
            cells.append(f"[bold]{text}[/] ({100 * change:.0f} %)" if moves else f"[dim]{text}[/]")
        shown.add_row(label, *cells)
    return shown


def _head(result: Sensitivity, knob: str) -> str:
    done = result.unfinished.get(knob)
    return f"{knob} ({done[0]} of {done[1]} values)" if done else knob


def _mark(result: Sensitivity) -> str:
    return f"{PARTIAL} " if result.is_partial else ""


def verdict(result: Sensitivity) -> str:
    """A line per knob; no conclusion from an unfinished sweep."""
    lines = [
        f"{knob}: no conclusion, {done} of {total} values were simulated"
        for knob, (done, total) in result.unfinished.items()
    ]
    for knob in (knob for knob in result.sweeps if knob not in result.unfinished):
        moved = [label for label in METRICS if result.movement(knob, label)[2] > MOVES]
        lines.append(
            f"{knob} moves {', '.join(moved) if moved else 'nothing'} by more than {100 * MOVES:.0f} %"
        )
    return "\n".join(lines)


def _format(label: str, value: float) -> str:
    if label in IN_SECONDS:
        return format_seconds(value)
    if label in ("hit rate", "goodput"):
        return f"{100 * value:.1f} %"
    return f"{value:.2g}" if value < 100 else f"{value:,.0f}"


def _write(result: Sensitivity, trace: Trace, config: SensitivityConfig) -> None:
    values: dict[str, Any] = {
        "command": command_line(),
        "trace": {"num_requests": len(trace), "provenance": list(trace.provenance)},
        "engine": asdict(config.replay.engine),
        "profile": config.replay.profile.name,
        "users": config.replay.users,
        "regime": _regime(trace, config),
        "is_partial": result.is_partial,
        "unfinished": {knob: {"done": n, "of": total} for knob, (n, total) in result.unfinished.items()},
        "best": result.best,
        "points": [asdict(point) for points in result.sweeps.values() for point in points],
    }
    text = json.dumps(values).replace("NaN", "null")
    save(config.out, text + "\n")
    save(config.out.with_suffix(".html"), page(result).to_html(include_plotlyjs=True))


def page(result: Sensitivity) -> Any:
    """A row per metric, a column per knob; the dot is where the other sweeps stand."""
    knobs = list(result.sweeps)
    figure = make_subplots(len(PLOTTED), max(len(knobs), 1), shared_yaxes=True, vertical_spacing=0.03)
    for row, label in enumerate(PLOTTED, 1):
        for column, knob in enumerate(knobs, 1):
            points = result.sweeps[knob]
            x, y = [f"{point.value:g}" for point in points], [point.metric(label) for point in points]
            sizes = [11 if point.value == result.best[knob] else 5 for point in points]
            figure.add_scatter(
                x=x,
                y=y,
                mode="lines+markers",
                marker={"size": sizes, "color": "#c8551b"},
                line={"color": "#1d4e89"},
                row=row,
                col=column,
            )
            figure.update_xaxes(type="category", row=row, col=column)
        figure.update_yaxes(title_text=label, rangemode="tozero", row=row, col=1)
    for column, knob in enumerate(knobs, 1):
        figure.update_xaxes(title_text=_head(result, knob), row=len(PLOTTED), col=column)
    at = ", ".join(f"{name}={value:g}" for name, value in result.best.items())
    return figure.update_layout(
        height=210 * len(PLOTTED), showlegend=False, title=f"{_mark(result)}Each knob alone, around {at}"
    )
