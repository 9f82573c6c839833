import json

import pytest

from kvpilot.agent.policies.hysteresis import HysteresisConfig
from kvpilot.agent.tune.result import Setting, TunedFormError, TunedResult, read_tuned

KNOBS = {"ttl_seconds": 20.0, "size_factor": 0.6, "max_batch": 32, "kv_level": 1}


def make(**changes) -> TunedResult:
    best = Setting(name="static-best", knobs=KNOBS, regime="all", score=0.5)
    other = Setting(name="calm", knobs={**KNOBS, "kv_level": 0}, regime="stationary", score=0.7)
    values = {
        "workload": "standard",
        "seeds": {"bursts": [1, 2]},
        "hashes": {"bursts": "aa"},
        "static_best": best,
        "portfolio": (best, other),
        "hysteresis": HysteresisConfig(calm={"kv_level": 0}, pressure=KNOBS),
        "scores": {"bursts": {"default": 0.1, "static-best": 0.5}},
    }
    return TunedResult(**{**values, **changes})


def test_a_result_survives_its_file(tmp_path):
    path = tmp_path / "new" / "tuned.json"
    make().write(path)
    assert read_tuned(path) == make()
    assert [p.name for p in path.parent.iterdir()] == ["tuned.json"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("kvpilot_tuned", 2, "another version: expected 1"),
        ("hysteresis", {"signal": "mood", "calm": {}, "pressure": {}}, "signal='mood'"),
        ("portfolio", [], "different names"),
        (
            "static_best",
            {"name": "x", "knobs": {"kv_level": 1}, "regime": "", "score": 0.0},
            "expected all of",
        ),
        (
            "static_best",
            {"name": "x", "knobs": {**KNOBS, "kv_level": "int4"}, "regime": "", "score": 0},
            "finite",
        ),
        ("static_best", 3, "not a result"),
        ("surprise", 1, "surprise"),
    ],
)
def test_files_of_another_form_are_refused_with_field_and_remedy(tmp_path, field, value, message):
    path = tmp_path / "tuned.json"
    make().write(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(TunedFormError, match=message) as caught:
        read_tuned(path)
    assert "tuned.json" in str(caught.value)
    assert "autotune tune" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff\xfe", b'{"kvpilot_replay": 1}'])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "tuned.json"
    path.write_bytes(content)
    with pytest.raises(TunedFormError, match=r"tuned\.json"):
        read_tuned(path)


def test_a_missing_file_says_how_to_make_one(tmp_path):
    with pytest.raises(TunedFormError, match="autotune tune"):
        read_tuned(tmp_path / "tuned.json")


def test_another_workload_is_refused_by_name():
    with pytest.raises(TunedFormError, match="switch differ or are missing"):
        make().check_workloads({"bursts": "aa", "switch": "bb"}, "tuned.json")
    make().check_workloads({"bursts": "aa"}, "tuned.json")
