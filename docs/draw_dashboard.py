"""Draws a dashboard without Grafana: each panel's own queries, answered by a Prometheus, as one page of plotly charts.

python -P docs/draw_dashboard.py dashboards/kvpilot-engine.json --prometheus http://127.0.0.1:9090 --out page.html
"""

import argparse
import json
import re
import time
from pathlib import Path
from typing import Any

import httpx
from plotly.colors import qualitative
from plotly.subplots import make_subplots

STEP_SECONDS = 2
COLUMNS = 3  # of a dashboard's rows
ROW_PIXELS = 260
MAX_NAMES = 5  # in a panel; a series that is 0 throughout is drawn, not named
UNITS = {"s": "seconds", "reqps": "per second", "ops": "per second", "percentunit": "share", "short": ""}


def series(arguments: argparse.Namespace, expression: str) -> list[dict[str, Any]]:
    """What Prometheus answers over the minutes shown; every template variable stands for all."""
    asked = re.sub(r"\$\w+", ".*", expression.replace("$__rate_interval", arguments.window))
    end, start = arguments.until, arguments.until - 60 * arguments.minutes
    parameters = {"query": asked, "start": start, "end": end, "step": STEP_SECONDS}
    answer = httpx.get(f"{arguments.prometheus}/api/v1/query_range", params=parameters, trust_env=False)
    return answer.raise_for_status().json()["data"]["result"]


def legend(pattern: str, labels: dict[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda match: labels.get(match[1], ""), pattern)


def draw(board: dict[str, Any], arguments: argparse.Namespace) -> str:
    panels = [panel for panel in board["panels"] if panel["type"] == "timeseries"]
    rows = -(-len(panels) // COLUMNS)
    figure = make_subplots(
        rows, COLUMNS, subplot_titles=[panel["title"] for panel in panels], vertical_spacing=0.36 / rows
    )
    for place, panel in enumerate(panels):
        row, column = place // COLUMNS + 1, place % COLUMNS + 1
        unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "")
        figure.update_yaxes(title_text=UNITS.get(unit, unit), rangemode="tozero", row=row, col=column)
        found = [
            (legend(target.get("legendFormat", ""), one["metric"]), one["values"])
            for target in panel["targets"]
            for one in series(arguments, target["expr"])
        ]
        names = 0
        for number, (name, values) in enumerate(found):
            x = [1000 * float(at) for at, _ in values]  # milliseconds, as plotly counts dates
            y = [float(value) if value != "NaN" else None for _, value in values]
            color = qualitative.Plotly[number % len(qualitative.Plotly)]
            figure.add_scatter(x=x, y=y, line={"color": color, "width": 1.5}, row=row, col=column)
            if any(y) and names < MAX_NAMES:
                domains = {"xref": "x domain", "yref": "y domain", "row": row, "col": column}
                where = {"x": 0.02, "y": 1 - 0.12 * names, "xanchor": "left", "yanchor": "top"}
                font = {"color": color, "size": 11}
                figure.add_annotation(
                    text=name, showarrow=False, font=font, bgcolor="rgba(255,255,255,0.6)", **where, **domains
                )
                names += 1
    shown = [1000 * (arguments.until - 60 * arguments.minutes), 1000 * arguments.until]
    figure.update_xaxes(type="date", range=shown, nticks=4, tickformat="%H:%M")
    title = f"{board['title']}: its queries, answered by Prometheus (drawn by plotly, not Grafana)"
    figure.update_layout(
        height=ROW_PIXELS * rows,
        title=title,
        showlegend=False,
        template="plotly_white",
        margin={"t": 90, "b": 40},
    )
    return figure.to_html(include_plotlyjs=True, config={"displayModeBar": False})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("board", type=Path)
    parser.add_argument("--prometheus", required=True, help="URL")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--until", type=float, default=time.time(), help="Unix seconds; default: now")
    parser.add_argument("--window", default="15s", help="in the place of $__rate_interval")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    board = json.loads(arguments.board.read_text(encoding="utf-8"))
    arguments.out.write_text(draw(board, arguments), encoding="utf-8")


if __name__ == "__main__":
    main()
