"""The checked-in dashboards: what the generator writes, names that exist, panels that fit."""

import json
import re
import shutil
import subprocess

import pytest
import yaml

from kvpilot.agent.control import metrics as control_metrics
from kvpilot.dashboards.names import AGENT_METRICS, AGENT_PREFIX
from kvpilot.dashboards.names import agent as agent_series
from kvpilot.dashboards.names import engine as engine_series
from kvpilot.dashboards.promql import Series
from kvpilot.engine.stats import METRICS

GRAFANA = "11.6.0"
KNOWN = {
    *(engine_series(name) for name in (*METRICS, "engine_info", "snapshot_time_seconds")),
    *(agent_series(name) for name in AGENT_METRICS),
}


def panels_of(board):
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def queries_of(board):
    return [(panel["title"], target["expr"]) for panel in panels_of(board) for target in panel["targets"]]


def plain(expression: str) -> str:
    """As Grafana asks it with everything chosen."""
    chosen = expression.replace("$__rate_interval", "1m")
    return re.sub(r"\$\w+", ".*", chosen)


def test_nothing_has_drifted(dashboards_folder):
    """Run `python -m kvpilot.dashboards` and commit what it writes."""
    main = pytest.importorskip("kvpilot.dashboards.__main__", reason="needs the extra `dashboards`")
    written = main.render()
    assert {
        path.name for path in (*dashboards_folder.glob("*.json"), *dashboards_folder.glob("*.yml"))
    } == set(written)
    for name, text in written.items():
        assert (dashboards_folder / name).read_text(encoding="utf-8") == text, name


def test_the_component_for_kubernetes_has_not_drifted():
    main = pytest.importorskip("kvpilot.dashboards.__main__", reason="needs the extra `dashboards`")
    for name, text in main.render_component().items():
        assert (main.component_folder() / name).read_text(encoding="utf-8") == text, name


def test_its_config_maps_hold_the_dashboards_and_fit(dashboards_folder):
    main = pytest.importorskip("kvpilot.dashboards.__main__", reason="needs the extra `dashboards`")
    written = main.component_folder() / "dashboards.yaml"
    held = {}
    for document in yaml.safe_load_all(written.read_text(encoding="utf-8")):
        assert document["metadata"]["labels"] == {"grafana_dashboard": "1"}
        assert len(json.dumps(document)) < 262_144  # what `kubectl apply` can note in an annotation
        held |= document["data"]
    assert held == {path.name: path.read_text(encoding="utf-8") for path in dashboards_folder.glob("*.json")}


def test_there_are_three(boards):
    assert {board["uid"] for board in boards.values()} == {
        "kvpilot-engine",
        "kvpilot-control",
        "kvpilot-fleet",
    }
    assert all(f"{board['uid']}.json" == name for name, board in boards.items())


def test_every_metric_exists(boards):
    for board in boards.values():
        texts = [expression for _, expression in queries_of(board)]
        texts += [variable.get("query", "") for variable in board["templating"]["list"]]
        for text in texts:
            names = re.findall(r"\bkvpilot_\w+", text if isinstance(text, str) else json.dumps(text))
            assert set(names) <= KNOWN, text


def test_all_that_is_exported_is_shown(boards):
    """Except what only machines need."""
    unseen = {
        "admissions",
        "knob_changes",
        "knob_revision",
        "pages",
        "pages_allocated",
        "pages_moved",
        "steps",
    }
    shown = {
        name
        for board in boards.values()
        for _, text in queries_of(board)
        for name in re.findall(r"kvpilot_\w+", text)
    }
    assert {name for name in METRICS if engine_series(name) not in shown} == unseen
    assert {name for name in AGENT_METRICS if agent_series(name) not in shown} == set()


def test_every_query_follows_the_variables(boards):
    for board in boards.values():
        for title, expression in queries_of(board):
            for selector in re.findall(r"kvpilot_\w+(\{[^}]*\})?", expression):
                assert "$instance" in selector or "$agent" in selector, (title, expression)


def test_panels_say_what_they_show_and_do_not_overlap(boards):
    for name, board in boards.items():
        taken = {}
        for panel in panels_of(board):
            assert panel["description"]
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24
            for x in range(place["x"], place["x"] + place["w"]):
                for y in range(place["y"], place["y"] + place["h"]):
                    assert (x, y) not in taken, f"{name}: {panel['title']} lies over {taken.get((x, y))}"
                    taken[x, y] = panel["title"]


def test_the_sidecars_metrics_are_named_as_it_names_them():
    assert AGENT_PREFIX == control_metrics.PREFIX
    assert {name: metric.kind for name, metric in control_metrics.METRICS.items()} == AGENT_METRICS


def test_unknown_metrics_cannot_be_built():
    with pytest.raises(KeyError):
        Series().rate("no_such_metric")
    with pytest.raises(KeyError):
        Series().agent_gauge("no_such_metric")


@pytest.mark.e2e
def test_promtool_takes_every_query(boards, prometheus_programs, tmp_path):
    rules = [
        {"record": f"panel:query:{index}", "expr": plain(expression)}
        for index, (_, expression) in enumerate(
            query for board in boards.values() for query in queries_of(board)
        )
    ]
    assert len(rules) > 60
    path = tmp_path / "panels.json"  # JSON is YAML
    path.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}), encoding="utf-8")
    done = subprocess.run(
        [prometheus_programs["promtool"], "check", "rules", path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert f"{len(rules)} rules found" in done.stdout


CHECK = """
import type { Dashboard, RowPanel, Panel } from '@grafana/schema';
type Plain<T> = T extends string ? `${T}` : T extends number ? number
  : T extends Array<infer E> ? Array<Plain<E>> : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
"""


@pytest.mark.e2e
def test_grafanas_own_types_take_them(boards, tmp_path):
    """The JSON as literals of @grafana/schema's Dashboard (enums by their values), through tsc."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm not found")
    packages = [f"@grafana/schema@{GRAFANA}", "typescript@5.4.5"]
    install = [npm, "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", *packages]
    done = subprocess.run(install, cwd=tmp_path, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"npm cannot install {' '.join(packages)}: {done.stderr[-200:]}")

    def types_take(boards: dict) -> str:
        literals = [f"const b{i}: Plain<Dashboard> = {json.dumps(b)};" for i, b in enumerate(boards.values())]
        (tmp_path / "check.ts").write_text(CHECK + "\n".join(literals) + "\nexport {};\n", encoding="utf-8")
        options = [
            "--noEmit",
            "--strict",
            "--skipLibCheck",
            "--moduleResolution",
            "node",
            "--target",
            "es2020",
        ]
        tsc = tmp_path / "node_modules" / ".bin" / "tsc"
        return subprocess.run(
            [tsc, *options, "check.ts"], cwd=tmp_path, capture_output=True, text=True
        ).stdout

    assert types_take(boards) == ""
    broken = json.loads(json.dumps(boards))
    broken["kvpilot-engine.json"]["refresh"] = 30
    assert "Type 'number' is not assignable" in types_take(broken)
