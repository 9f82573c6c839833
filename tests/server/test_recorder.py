"""`--record`: a trace of what was asked for, and nothing of what was said."""

import errno
import json
import os
import time

import pytest

from kvpilot.engine.errors import ConfigError
from kvpilot.engine.request import Request
from kvpilot.engine.server.recorder import TrafficRecorder
from kvpilot.env.traces.readers import read_trace

PAGE = 4
TEXT = "the quick brown fox"


def ended(
    name: str = "a", prompt_tokens: int = 9, output_tokens: int = 3, *, arrival: float = 1.0
) -> Request:
    request = Request(
        request_id=name,
        num_prompt_tokens=prompt_tokens,
        max_tokens=output_tokens,
        arrival_time=arrival,
        block_hash=lambda index: f"{name}-{index}".encode().ljust(16, b"\0"),
    )
    request.num_tokens += output_tokens
    request.first_admission_time = arrival
    return request


def recorder(path, page_size: int = PAGE) -> TrafficRecorder:
    return TrafficRecorder(path, page_size=page_size, clock_offset=2e9)


def complete(server, prompt: str, max_tokens: int = 5, **more):
    body = {"model": "stub", "prompt": prompt, "max_tokens": max_tokens, **more}
    answer = server.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_what_a_server_records_is_a_trace(run_server, tmp_path):
    path = tmp_path / "r.jsonl"
    before = time.time()
    with run_server(record=path) as server:
        reply = complete(server, TEXT, 8)
        complete(server, TEXT + reply + " jumps")
        complete(server, "something else!", 50)
    trace = read_trace(path)
    assert trace.prompt_tokens.tolist() == [19, 19 + 8 + 6, 15]
    assert trace.output_tokens.tolist() == [8, 5, 4]  # three letters and the end token after "!"
    assert trace.block_size == PAGE
    assert trace.blocks_of(1)[:4].tolist() == trace.blocks_of(0).tolist()
    assert trace.session.tolist() == [0, 0, 1]
    assert trace.turn.tolist() == [1, 2, 1]
    assert trace.reply_blocks(0).tolist() == trace.blocks_of(1)[:6].tolist()
    assert before - 1 < trace.provenance[-1]["unix_start"] < time.time() + 1


def test_no_text_is_recorded(run_server, tmp_path):
    path = tmp_path / "r.jsonl"
    with run_server(record=path) as server:
        complete(server, TEXT)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    keys = {"arrival", "prompt_tokens", "output_tokens", "block_size", "blocks"}
    assert [set(line) for line in lines] == [{"kvpilot_trace", "provenance"}, keys]
    assert all(0 <= block < 1 << 63 for block in lines[1]["blocks"])
    assert "quick" not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0


def test_a_client_that_leaves_is_recorded_with_what_it_got(run_server, tmp_path, wait_until):
    path = tmp_path / "r.jsonl"
    with run_server(record=path) as server:
        server.runner.step_seconds = 0.01
        body = {"model": "stub", "prompt": TEXT, "max_tokens": 400, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
        wait_until(lambda: len(path.read_text().splitlines()) == 2)
    assert 1 <= read_trace(path).output_tokens[0] < 400


def test_each_line_is_there_at_once_and_appended(tmp_path):
    path = tmp_path / "r.jsonl"
    with recorder(path) as first:
        first.record(ended("a"))
        assert len(read_trace(path)) == 1
    with recorder(path) as second:
        second.record(ended("b", arrival=5.0))
        second.record(ended("a", arrival=9.0))
    trace = read_trace(path)
    assert trace.arrival_seconds.tolist() == [0.0, 4.0, 8.0]
    assert trace.blocks_of(0).tolist() == trace.blocks_of(2).tolist()  # the same over restarts
    assert [entry["step"] for entry in trace.provenance] == ["record", "record", "read", "start_at_zero"]


def test_what_was_never_admitted_is_not_recorded(tmp_path):
    with recorder(tmp_path / "r") as file:
        request = ended()
        request.first_admission_time = None
        file.record(request)
        assert (file.num_recorded, file.num_lost) == (0, 0)


@pytest.mark.parametrize("written", [0, 17])
def test_a_full_disk_loses_lines_and_nothing_else(tmp_path, monkeypatch, caplog, written):
    path = tmp_path / "r"
    with recorder(path) as file:
        file.record(ended("a"))
        real = os.write

        def full(descriptor, line):
            if not written:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(descriptor, line[:written])

        monkeypatch.setattr(os, "write", full)
        file.record(ended("b"))
        file.record(ended("c"))
        monkeypatch.setattr(os, "write", real)
        file.record(ended("d"))
        assert (file.num_recorded, file.num_lost) == (2, 2)
    assert len(read_trace(path)) == 2  # no torn line between them
    assert [record.levelname for record in caplog.records].count("ERROR") == 1
    assert "serving goes on" in caplog.text


def test_serving_goes_on_without_a_disk(run_server, tmp_path, monkeypatch):
    with run_server(record=tmp_path / "r") as server:
        before = complete(server, TEXT)
        real = os.write

        def full(descriptor, line):
            if b"prompt_tokens" in line:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(descriptor, line)

        monkeypatch.setattr(os, "write", full)
        assert complete(server, TEXT) == before
        monkeypatch.undo()
        assert complete(server, TEXT) == before
    assert len(read_trace(tmp_path / "r")) == 2


def test_a_line_that_a_crash_cut_off_stays_alone(tmp_path):
    path = tmp_path / "r"
    with recorder(path) as file:
        file.record(ended("a"))
    path.write_bytes(path.read_bytes()[:-5])
    with recorder(path) as file:
        file.record(ended("b"))
    trace = read_trace(path, skip_bad=True)
    assert len(trace) == 1
    assert trace.provenance[-2]["skipped"] == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"my notes\n", "is not a recording: name another file"),
        (b'{"kvpilot_trace":1,"provenance":[{"block_size":16}]}\n', "has pages of 16 tokens, this engine 4"),
        (b'{"arrival":1,"block_size":16}\n', "has pages of 16 tokens, this engine 4"),
    ],
)
def test_another_file_is_not_appended_to(tmp_path, content, message):
    path = tmp_path / "r"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        recorder(path)
    assert path.read_bytes() == content


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"record=.*nowhere.* cannot be written"):
        recorder(tmp_path / "nowhere" / "r")
