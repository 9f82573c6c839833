"""`autotune audit`: what its filters let through."""

import json

import pytest
from typer.testing import CliRunner

from kvpilot.agent import cli
from kvpilot.agent.control.audit import AuditLog
from kvpilot.agent.control.nouns import Decision, Outcome

FIGURES = {"hit_rate": 0.5, "ttft_p99_seconds": 1.0, "e2e_mean_seconds": 2.0, "objective": 0.25}
PRESENT = {"kv_level": 0, "max_batch": 16}


def decided(time: float, outcome: Outcome, **changes: float) -> dict:
    decision = Decision(time=time, outcome=outcome, wanted=changes, changes=changes)
    return {"kind": "decision", **decision.as_dict()}


def simulated(time: float, **proposed: float) -> dict:
    result = {"requests": 40, "present": FIGURES, "proposed": FIGURES}
    question = {"present": PRESENT, "proposed": {**PRESENT, **proposed}, "pool_bytes": None}
    return {"kind": "counterfactual", "time": time, "traffic": "recorded", **question, "result": result}


@pytest.fixture
def audit(tmp_path):
    """The audit of four lines: what is shown, and the records of --json."""
    log = AuditLog(tmp_path / "audit.jsonl")
    for record in (
        decided(1e9, Outcome.APPLIED, kv_level=1),
        simulated(1e9 + 60, kv_level=1),
        decided(2e9, Outcome.ADVISED, max_batch=8),
        simulated(2e9 + 60, max_batch=8),
    ):
        log.write(record)

    def run(*options: str) -> tuple[str, list[dict]]:
        shown, lines = (
            CliRunner().invoke(cli.app, ["audit", str(tmp_path / "audit.jsonl"), *options, *form])
            for form in ((), ("--json",))
        )
        assert shown.exit_code == lines.exit_code == 0
        return shown.output, [json.loads(line) for line in lines.output.splitlines()]

    return run


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ("", [0, 1, 2, 3]),
        ("--last 1", [3]),
        ("--last 3", [1, 2, 3]),
        ("--since 2020-01-01T00:00:00", [2, 3]),
        ("--knob kv_level", [0, 1]),
        ("--knob ttl_seconds", []),
        ("--outcome applied", [0]),
        ("--outcome counterfactual", [1, 3]),
        ("--outcome advised --outcome counterfactual --knob max_batch", [2, 3]),
        ("--reason step", []),
    ],
)
def test_filters_hold_for_counterfactuals_as_for_decisions(audit, options, numbers):
    shown, records = audit(*options.split())
    times = [1e9, 1e9 + 60, 2e9, 2e9 + 60]
    assert [record["time"] for record in records] == [times[number] for number in numbers]
    assert ("kv_level=1: hit_rate" in shown) == (1 in numbers)
    assert ("max_batch=8: hit_rate" in shown) == (3 in numbers)
    assert f"{len({0, 2} & set(numbers))} decisions" in shown


def test_changes_of_what_may_be_done_are_counted_too(audit, tmp_path):
    log = AuditLog(tmp_path / "audit.jsonl")
    for time, killed in ((3e9, "/run/kill exists"), (3e9 + 9, "")):
        log.write(
            {
                "kind": "control",
                "time": time,
                "mode": "auto",
                "acts": not killed,
                "killed": killed,
                "hold": "",
            }
        )
    shown, records = audit("--outcome", "control")
    assert [record["time"] for record in records] == [3e9, 3e9 + 9]
    assert "2 changes of what may be done, 0 decisions." in shown
    whole, _ = audit()
    assert "2 decisions: 1 applied, 1 advised." in whole
    assert "2 changes of what may be done" in whole
