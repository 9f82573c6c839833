"""`python -m kvpilot.dashboards [FOLDER]`: writes dashboards and rules, by default over the ones checked in, with the
Kubernetes component that carries them."""

import json
import sys
from importlib.resources import files
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from kvpilot.dashboards.boards import BOARDS, build
from kvpilot.dashboards.manifests import render_config_maps, render_prometheus_rule
from kvpilot.dashboards.rules import render_rules


def render() -> dict[str, str]:
    """Text by file name."""
    return {**_boards(), "kvpilot-rules.yml": render_rules()}


def render_component() -> dict[str, str]:
    """What the kustomize component `monitoring` consists of besides its PodMonitor."""
    return {
        "prometheus-rule.yaml": render_prometheus_rule(),
        "dashboards.yaml": render_config_maps(_boards()),
    }


def component_folder() -> Path:
    return Path(str(files("kvpilot.k8s"))) / "manifests" / "components" / "monitoring"


def _boards() -> dict[str, str]:
    return {f"{board.uid}.json": _json(build(board)) for board in BOARDS}


def _json(model: object) -> str:
    return json.dumps(model, cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def write(folder: Path, written: dict[str, str]) -> None:
    for name, text in written.items():
        (folder / name).write_text(text, encoding="utf-8")
        print(folder / name)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write(Path(sys.argv[1]), {**render(), **render_component()})
    else:
        write(Path(str(files("kvpilot.dashboards"))), render())
        write(component_folder(), render_component())
