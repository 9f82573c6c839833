"""The few kinds of panels that the dashboards are made of, on Grafana's builders."""

from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    BigValueTextMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import DataSourceRef

PROMETHEUS = DataSourceRef(type_val="prometheus", uid="${datasource}")
HEIGHT = 8


@dataclass(frozen=True, kw_only=True)
class Panel:
    """What is shown: (expression, legend) pairs with a unit of Grafana's, and what it tells the reader."""

    title: str
    queries: tuple[tuple[str, str], ...]
    tells: str
    unit: str = "short"
    kind: str = "lines"  # lines, stacked or number
    span: int = 8  # of 24 columns
    maximum: float | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


def add_row(board: dashboard.Dashboard, row: Row) -> None:
    """A heading and its panels below."""
    board.with_row(dashboard.Row(row.title))
    for panel in row.panels:
        board.with_panel(_builder(panel))


def _builder(panel: Panel) -> Any:
    made = _number() if panel.kind == "number" else _lines(stacked=panel.kind == "stacked")
    made = made.title(panel.title).description(panel.tells).unit(panel.unit).datasource(PROMETHEUS)
    made = made.span(panel.span).height(HEIGHT)
    if panel.maximum is not None:
        made = made.min(0).max(panel.maximum)
    for index, (expression, legend) in enumerate(panel.queries):
        query = prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(chr(ord("A") + index))
        made = made.with_target(query.datasource(PROMETHEUS).range())
    return made


def _number() -> stat.Panel:
    return (
        stat.Panel()
        .graph_mode(BigValueGraphMode.NONE)
        .color_mode(BigValueColorMode.NONE)
        .text_mode(BigValueTextMode.VALUE_AND_NAME)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    )


def _lines(*, stacked: bool) -> timeseries.Panel:
    legend = (
        common.VizLegendOptions()
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    tooltip = common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING)
    made = timeseries.Panel().legend(legend).tooltip(tooltip).line_width(1).span_nulls(False)
    if stacked:
        return made.fill_opacity(40).stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    return made.fill_opacity(0)
