"""The small recorded traffic of the environment's tests."""

import importlib.util
from pathlib import Path

import pytest

_source = Path(__file__).parents[1] / "tuning" / "conftest.py"
_spec = importlib.util.spec_from_file_location("small_traffic", _source)
assert _spec is not None
assert _spec.loader is not None
_traffic = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_traffic)

cache, episode, folder, profile, workload = (
    getattr(_traffic, name) for name in ("cache", "episode", "folder", "profile", "workload")
)


@pytest.fixture
def short(workload):
    """A few windows an episode."""
    return workload.with_(seconds=(40.0, 60.0), warmup_seconds=10.0)
