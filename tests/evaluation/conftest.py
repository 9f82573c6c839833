"""The small recorded traffic of the environment's tests, and what tuning it gave."""

import importlib.util
from pathlib import Path

import pytest

from kvpilot.agent.policies.hysteresis import HysteresisConfig
from kvpilot.agent.tune.result import Setting, TunedResult

_source = Path(__file__).parents[1] / "tuning" / "conftest.py"
_spec = importlib.util.spec_from_file_location("small_traffic", _source)
assert _spec is not None
assert _spec.loader is not None
_traffic = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_traffic)

cache, episode, folder, profile, workload = (
    getattr(_traffic, name) for name in ("cache", "episode", "folder", "profile", "workload")
)

CALM = {"ttl_seconds": 60.0, "size_factor": 0.5, "max_batch": 8, "kv_level": 0}
DEEP = {**CALM, "kv_level": 2}


@pytest.fixture
def tuned() -> TunedResult:
    best = Setting(name="static-best", knobs=DEEP, regime="all", score=0.5)
    calm = Setting(name="calm", knobs=CALM, regime="small/quiet", score=0.6)
    return TunedResult(
        workload="small",
        seeds={"small": [0]},
        hashes={"small": "aa"},
        static_best=best,
        portfolio=(best, calm),
        hysteresis=HysteresisConfig(signal="waiting", high=4, low=1, calm=CALM, pressure=DEEP),
    )
