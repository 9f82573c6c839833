"""`python -m kvpilot.dashboards [FOLDER]`: writes dashboards and rules, by default over the ones checked in."""

import json
import sys
from importlib.resources import files
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from kvpilot.dashboards.boards import BOARDS, build
from kvpilot.dashboards.rules import render_prometheus_rule, render_rules


def render() -> dict[str, str]:
    """Text by file name."""
    boards = {f"{board.uid}.json": _json(build(board)) for board in BOARDS}
    return {
        **boards,
        "kvpilot-rules.yml": render_rules(),
        "kvpilot-prometheusrule.yml": render_prometheus_rule(),
    }


def _json(model: object) -> str:
    return json.dumps(model, cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def main(folder: Path) -> None:
    for name, text in render().items():
        (folder / name).write_text(text, encoding="utf-8")
        print(folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(str(files("kvpilot.dashboards"))))
