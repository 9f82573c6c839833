"""Modes, kill switches, the control document and the state file."""

import logging

import pytest

from kvpilot.agent.control.nouns import Mode
from kvpilot.agent.control.state import SafeState, StateError, StateFile
from kvpilot.agent.control.switches import KILL_VARIABLE, Switches, intersection
from kvpilot.agent.guard import Watch
from kvpilot.k8s.control_document import Bounds, ControlDocument, Range
from kvpilot.k8s.document_source import DocumentFile


def write(path, revision: int = 1, **changes) -> None:
    path.write_text(ControlDocument(revision=revision, **changes).to_yaml())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "control.yaml"


@pytest.fixture
def switches(path):
    return Switches(document=DocumentFile(path), pod_name="chat-1", environment={})


@pytest.mark.parametrize(("mode", "acts"), [("off", False), ("advisory", False), ("auto", True)])
def test_without_a_document_the_configured_mode_counts(mode, acts):
    control = Switches(mode=Mode(mode), environment={})()
    assert (control.mode.value, control.acts) == (mode, acts)


def test_the_document_sets_the_mode_while_it_runs(switches, path):
    write(path, 1, mode="advisory")
    assert not switches().acts
    write(path, 2, mode="auto")
    assert switches().acts
    write(path, 3, mode="off")
    assert switches().mode is Mode.OFF


def test_only_a_named_pod_acts_in_a_canary(switches, path):
    write(path, 1, mode="canary", canary_pods=("chat-0",))
    assert not switches().acts
    write(path, 2, mode="canary", canary_pods=("chat-0", "chat-1"))
    assert switches().acts
    write(path, 3, mode="canary")
    assert not switches().acts


def test_a_missing_document_holds(switches):
    control = switches()
    assert not control.acts
    assert "cannot be read" in control.hold


def test_a_document_that_comes_back_is_in_force_again(switches, path):
    write(path, 1, mode="auto")
    assert switches().acts
    path.rename(path.with_suffix(".away"))
    assert "cannot be read" in switches().hold
    path.with_suffix(".away").rename(path)
    assert switches().hold == ""


def test_a_document_that_is_not_understood_leaves_the_last_one_in_force_and_holds(switches, path, caplog):
    write(path, 4, mode="auto")
    switches()
    path.write_text("mode: faster\nrevision: 5\n")
    with caplog.at_level(logging.WARNING):
        control = switches()
        switches()
    assert control.mode is Mode.AUTO
    assert "mode='faster'" in control.hold
    assert len(caplog.records) == 1  # said once


def test_an_older_revision_is_ignored_and_holds(switches, path):
    write(path, 4, mode="off")
    switches()
    write(path, 3, mode="auto")
    control = switches()
    assert control.mode is Mode.OFF
    assert "older" in control.hold


def test_every_kill_switch_stops_an_auto_mode(switches, path, tmp_path):
    write(path, 1, mode="auto")
    assert switches().acts
    switches.environment = {KILL_VARIABLE: "1"}
    assert KILL_VARIABLE in switches().killed
    switches.environment = {KILL_VARIABLE: "0"}
    switches.kill_file = tmp_path / "kill"
    assert switches().acts
    switches.kill_file.symlink_to("/nowhere")  # whatever it is, it is there
    assert str(switches.kill_file) in switches().killed
    assert not switches().acts
    switches.kill_file.unlink()
    write(path, 2, mode="auto", kill=True)
    assert switches().killed
    assert not switches().acts


def test_a_hold_is_passed_on_and_bounds_only_become_narrower(switches, path):
    switches.bounds = {"max_batch": (4, 32)}
    write(path, 1, mode="auto", hold="a rollout", bounds=Bounds(max_batch=Range(low=1, high=16)))
    control = switches()
    assert control.hold == "a rollout"
    assert control.allowed["max_batch"] == (4, 16)
    assert intersection({}, {"kv_level": (None, 1)}) == {"kv_level": (None, 1)}


def test_the_document_is_followed_when_it_changes_and_only_then(path):
    followed = []
    switches = Switches(document=DocumentFile(path), on_document=followed.append, environment={})
    write(path, 1)
    switches()
    switches()
    write(path, 2, mode="auto")
    switches()
    assert [document.revision for document in followed] == [1, 2]


def test_the_latch_outlives_the_process(tmp_path):
    trial = Watch(at=1.0, before={"kv_level": 0}, after={"kv_level": 1}, baseline=(0.1,), unix_time=9.0)
    state = SafeState("too many reverts", (1.0, 2.0), trial)
    StateFile(tmp_path / "state.json").write(state)
    assert StateFile(tmp_path / "state.json").read() == state
    assert StateFile(tmp_path / "none.json").read() == SafeState()


@pytest.mark.parametrize(
    "text", ["", "[]", '{"safe_mode": 1, "reverts": []}', '{"safe_mode": "", "reverts": [NaN]}']
)
def test_a_state_file_that_cannot_be_understood_is_an_error_and_no_clean_slate(tmp_path, text):
    path = tmp_path / "state.json"
    path.write_text(text)
    with pytest.raises(StateError, match="remove it"):
        StateFile(path).read()
    with pytest.raises(StateError, match="cannot be written"):
        StateFile(tmp_path / "no" / "state.json").write(SafeState())
