"""Every kill switch that needs no cluster, thrown at a loop that was changing knobs and would have gone on: from the
next observation on nothing is written, the knobs stand where they stood, no request is lost, the audit log says why.
The switches of a cluster are in `tests/k8s/test_live_kill_switches.py`."""

import signal

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]


def test_the_kill_file(rehearsal, tmp_path):
    kill_file = tmp_path / "kill"
    with rehearsal.loop(mode="auto", kill_file=str(kill_file)) as loop:
        line, seconds, late = rehearsal.throw(loop, kill_file.touch)
        assert (line["killed"], line["acts"]) == (f"{kill_file} exists", False)
        assert late <= 1  # the round that was under way
        held = loop.records("decision")[-1]
        assert [entry["reason"] for entry in held["constraints"]] == ["kill-switch"]
        rehearsal.release(loop, kill_file.unlink)
    rehearsal.row("kill file", {**line, "killed": "FILE exists"}, seconds, late)


@pytest.mark.parametrize(
    ("label", "change", "expected"),
    [
        ("`kill: true` in the control document", "kill: true", {"killed": "the control document says kill"}),
        ("`mode: off` in the control document", "mode: 'off'", {"mode": "off", "killed": ""}),
        ("`mode: advisory` in the control document", "mode: advisory", {"mode": "advisory", "killed": ""}),
    ],
)
def test_the_control_document(rehearsal, tmp_path, label, change, expected):
    document = tmp_path / "control.yaml"

    def write(revision: int, *more: str) -> None:
        mode = [] if any(line.startswith("mode") for line in more) else ["mode: auto"]
        lines = [f"revision: {revision}", "policy: {name: random}", *mode, *more]
        (tmp_path / "new").write_text("\n".join(lines) + "\n")
        (tmp_path / "new").replace(document)

    write(1)
    with rehearsal.loop(control_file=str(document)) as loop:
        line, seconds, late = rehearsal.throw(loop, lambda: write(2, change))
        assert {name: line[name] for name in expected} == expected
        assert not line["acts"]
        assert late <= 1
        rehearsal.release(loop, lambda: write(3))
    rehearsal.row(label, line, seconds, late)


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("KVPILOT_KILL", "1", {"killed": "the environment says KVPILOT_KILL"}),
        ("KVPILOT_MODE", "off", {"mode": "off"}),
    ],
)
def test_the_environment(rehearsal, variable, value, expected):
    with rehearsal.loop(environment={"KVPILOT_MODE": "auto"}) as loop:
        rehearsal.wait_for_changes(loop)
    revision = rehearsal.revision()  # ended by SIGTERM
    with rehearsal.loop(environment={"KVPILOT_MODE": "auto", variable: value}) as loop:
        rehearsal.wait_until(lambda: loop.records("control"), what=f"{loop.log}")
        rehearsal.check_still(loop)
        (line,) = loop.records("control")
    assert {name: line[name] for name in expected} == expected
    assert rehearsal.revision() == revision
    assert loop.records("intent") == []
    rehearsal.row(f"{variable}={value} at the start", line, 0.0, 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_process(rehearsal, number):
    with rehearsal.loop(mode="auto") as loop:
        rehearsal.wait_for_changes(loop)
        loop.process.send_signal(number)
        loop.process.wait(20)
        revision = rehearsal.revision()
    intents = loop.records("intent")
    with rehearsal.loop(mode="advisory") as other:
        rehearsal.wait_until(lambda: other.ticks() > 6, seconds=60, what=f"{other.log}")
    assert rehearsal.revision() == revision
    assert len(intents) - loop.applied() <= 1  # what was under way
