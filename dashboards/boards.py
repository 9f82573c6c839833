"""The three dashboards."""

from dataclasses import dataclass

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    VariableRefresh,
    VariableSort,
)

from kvpilot.dashboards import control, engine, fleet
from kvpilot.dashboards.names import agent
from kvpilot.dashboards.names import engine as engine_name
from kvpilot.dashboards.panels import PROMETHEUS, Row, add_row

TAG = "kvpilot"


@dataclass(frozen=True, kw_only=True)
class Board:
    """`uid` is also the file's name."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]


BOARDS = (
    Board(uid="kvpilot-engine", title="kvpilot: engine", description=engine.TELLS, rows=engine.ROWS),
    Board(uid="kvpilot-control", title="kvpilot: control", description=control.TELLS, rows=control.ROWS),
    Board(uid="kvpilot-fleet", title="kvpilot: fleet", description=fleet.TELLS, rows=fleet.ROWS),
)


def build(board: Board) -> object:
    """The dashboard's model, for the SDK's JSON encoder."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags([TAG])
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .readonly()
        .link(
            dashboard.DashboardLink("kvpilot")
            .type(DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .keep_time(True)
            .include_vars(True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(_labels("model", "Model", engine_name("engine_info"), "model_name"))
        .with_variable(
            _labels("instance", "Engine", f'{engine_name("engine_info")}{{model_name=~"$model"}}', "instance")
        )
        .with_variable(_labels("agent", "Sidecar", agent("mode"), "instance"))
    )
    for row in board.rows:
        add_row(made, row)
    model = made.build()
    assert model.templating is not None
    for variable in model.templating.list_val or ():
        variable.auto = variable.auto_min = variable.auto_count = (
            None  # of interval variables, which these are not
        )
    return model


def _labels(name: str, label: str, series: str, of: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(PROMETHEUS)
        .query(f"label_values({series}, {of})")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )
