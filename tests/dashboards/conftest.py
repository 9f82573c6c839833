import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(str(files("kvpilot.dashboards")))


@pytest.fixture(scope="session")
def boards() -> dict[str, dict[str, Any]]:
    """The checked-in dashboards, by file name."""
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))}


@pytest.fixture(scope="session")
def folder() -> Path:
    """Where dashboards and rules lie."""
    return FOLDER
