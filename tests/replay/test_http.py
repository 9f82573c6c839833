"""Against a server: what is sent, what is made of its answers, and how it ends."""

import json
from dataclasses import replace

import httpx
import pytest

from kvpilot.engine.errors import ConfigError
from kvpilot.env.replay.http import HttpReplay, ServerError, replay_http
from kvpilot.env.replay.report import render
from kvpilot.env.replay.result import read_result
from kvpilot.env.replay.sim import replay_simulated
from kvpilot.env.replay.synthetic import SyntheticText
from kvpilot.env.slo import Slo

CONFIG = HttpReplay(url="http://server", model="m", slo=Slo(), drain_seconds=5.0)


@pytest.fixture
def fast(chats):
    """The same chats within a fifth of a second."""
    return chats.replace(arrival_seconds=chats.arrival_seconds / 500)


class FakeServer:
    """Answers completions; `answer` may change what it says to a body."""

    def __init__(self, answer=None) -> None:
        self.bodies: list[dict] = []
        self._answer = answer

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.bodies.append(body)
        if self._answer and (response := self._answer(body)):
            return response
        if not body["stream"]:
            return httpx.Response(200, json={"choices": [{"text": "x"}]})
        events = [{"choices": [{"text": "x"}]}] * body["max_tokens"]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        events.append({"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": 8}}})
        lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        return httpx.Response(200, text=lines + "data: [DONE]\n\n")


def run(trace, config, server, **options):
    return replay_http(trace, config, transport=httpx.MockTransport(server), **options)


def test_prompts_are_the_synthetic_ids_and_answers_are_counted(fast):
    server = FakeServer()
    result = run(fast, CONFIG, server)
    text, sent = SyntheticText(fast), server.bodies[1:]
    assert sorted(map(tuple, (body["prompt"] for body in sent))) == sorted(
        tuple(text.prompt(row)) for row in range(len(fast))
    )
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in sent)
    assert result.requests["output_tokens"] == fast.output_tokens.tolist()
    assert result.requests["cached_tokens"] == [8] * len(fast)
    assert set(result.requests["status"]) == {"done"}
    assert not result.is_partial
    assert "real time against http://server" in render([("live", result)])


@pytest.mark.parametrize("has_statistics", [True, False])
def test_a_live_result_stopped_early_and_read_back_is_a_page(fast, chats, replay, tmp_path, has_statistics):
    """It has no profile, queue times or engine settings, and no windows if the server is another engine."""
    late = replace(CONFIG, end_seconds=float(fast.arrival_seconds[3]))
    windows = replay_simulated(chats, replay).windows if has_statistics else {}
    replace(run(fast, late, FakeServer()), windows=windows).write(tmp_path / "live.json")
    result = read_result(tmp_path / "live.json")
    page = render([("live", result)])
    assert result.is_partial
    assert "was stopped before its end" in page
    assert ("Pool by state" in page) == has_statistics
    assert "Where live comes from" in page
    assert "real time against http://server" in render([("live", result), ("again", result)])


def test_it_is_open_loop(fast):
    result = run(fast, CONFIG, FakeServer())
    for sent, arrival in zip(result.requests["arrival_seconds"], fast.arrival_seconds.tolist(), strict=True):
        assert sent >= arrival


def test_a_server_that_takes_neither_ids_nor_ignore_eos_gets_words(fast):
    def picky(body):
        if not isinstance(body["prompt"], str) or "ignore_eos" in body:
            return httpx.Response(400, json={"error": "unknown"})
        return None

    server = FakeServer(picky)
    result = run(fast, CONFIG, server)
    assert result.config["prompts"] == "words"
    assert result.config["ignore_eos"] is False
    assert set(result.requests["status"]) == {"done"}


def test_refusals_and_errors_are_told_apart(fast):
    def failing(body):
        if not body["stream"]:
            return None
        return {0: httpx.Response(429), 1: httpx.Response(500, text="boom")}.get(body["max_tokens"] % 3)

    result = run(fast, CONFIG, FakeServer(failing))
    expected = [{0: "refused", 1: "failed", 2: "done"}[n % 3] for n in fast.output_tokens.tolist()]
    assert result.requests["status"] == expected
    assert any("boom" in error for error in result.provenance["errors"])
    assert set(result.summary["reasons"]) <= {"refused", "failed"}
    for status, reasons in result.summary["reasons"].items():
        assert sum(reasons.values()) == result.summary["status"][status]
    assert result.summary["goodput_share"] == pytest.approx(expected.count("done") / len(fast))


def test_an_error_within_the_stream_is_a_failure(fast):
    def broken(body):
        if body["stream"]:
            return httpx.Response(200, text='data: {"error": {"message": "lost"}}\n\n')
        return None

    result = run(fast, CONFIG, FakeServer(broken))
    assert set(result.requests["status"]) == {"failed"}


def test_stopping_cuts_off_and_keeps_the_rest(fast):
    seen = []
    slow = fast.replace(arrival_seconds=fast.arrival_seconds * 1000)
    result = run(
        slow,
        CONFIG,
        FakeServer(),
        progress=lambda done, total: seen.append(done),
        is_stopped=lambda: len(seen) > 4,
    )
    assert result.is_partial
    assert len(result.requests["row"]) < len(slow)


def test_a_server_that_is_not_there_is_an_error(fast):
    def refuse(request):
        raise httpx.ConnectError("connection refused")

    with pytest.raises(ServerError, match="connection refused"):
        run(fast, CONFIG, refuse)


def test_a_server_without_completions_is_an_error(fast):
    with pytest.raises(ServerError, match="404"):
        run(fast, CONFIG, lambda request: httpx.Response(404, text="not found"))


@pytest.mark.parametrize("changes", [{"url": "server:80"}, {"prompts": "tokens"}])
def test_bad_settings_are_refused(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        replace(CONFIG, **changes)
