"""What a well-behaved client gets."""

import math

import pytest


def complete(server, **fields):
    body = {"model": "stub", "prompt": "Hello", "max_tokens": 8, **fields}
    return server.client.post("/v1/completions", json=body)


def chat(server, **fields):
    body = {"model": "stub", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, **fields}
    return server.client.post("/v1/chat/completions", json=body)


def test_completion(server):
    answer = complete(server).json()
    assert answer["object"] == "text_completion"
    assert answer["model"] == "stub"
    choice = {"index": 0, "text": "abcdefgh", "logprobs": None, "finish_reason": "length"}
    assert answer["choices"] == [choice]
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 8,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_prompt_as_token_ids_is_the_same_prompt(server):
    ids = server.tokenizer.encode("Hello!")
    answers = [complete(server, prompt=p).json() for p in ("Hello!", ids, ["Hello!"], [ids])]
    assert [a["choices"][0]["text"] for a in answers] == ["abc"] * 4
    assert {a["usage"]["prompt_tokens"] for a in answers} == {6}


def test_end_token_stops_and_is_not_text(server):
    choice = complete(server, prompt="Hi!").json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "stop")


def test_ignore_eos_goes_on(server):
    answer = complete(server, prompt="Hi!", ignore_eos=True).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 8


def test_stop_token_ids(server):
    ids = server.tokenizer.encode("d")
    choice = complete(server, stop_token_ids=ids).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "stop")


@pytest.mark.parametrize("stop", ["ef", ["xyz", "ef"]])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(server, events, stop, stream):
    response = complete(server, stop=stop, stream=stream)
    choices = [e["choices"][0] for e in (events(response.text) if stream else [response.json()])]
    assert "".join(choice["text"] for choice in choices) == "abcd"
    assert choices[-1]["finish_reason"] == "stop"
    assert server.engine.snapshot().value("requests_finished", "stop") == 1


def test_held_back_text_comes_out_at_the_end(server):
    assert complete(server, stop="ghi").json()["choices"][0]["text"] == "abcdefgh"


def test_chat(server):
    answer = chat(server).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "abcdefgh", "refusal": None}
    assert answer["usage"]["prompt_tokens"] == len("<user>Hello\n<assistant>")


def test_chat_takes_parts_and_an_answer_sent_back(server):
    first = chat(server).json()["choices"][0]["message"]
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    messages = [
        {"role": "user", "content": parts},
        {**first, "tool_calls": []},
        {"role": "user", "content": "!"},
    ]
    answer = chat(server, messages=messages).json()
    assert answer["usage"]["prompt_tokens"] == len("<user>Hello\n<assistant>abcdefgh\n<user>!\n<assistant>")


def test_chat_without_a_limit_may_fill_the_context(server):
    answer = chat(server, max_tokens=None).json()
    assert answer["usage"]["total_tokens"] == server.engine.max_model_len
    assert answer["choices"][0]["finish_reason"] == "length"


def test_fields_without_effect_are_taken(server):
    neutral = {"n": 1, "presence_penalty": 0, "tools": None, "response_format": {"type": "text"}}
    assert chat(server, user="me", logit_bias={}, **neutral).status_code == 200


@pytest.mark.parametrize("level", [None, 0, 1])
def test_a_limit_on_the_kv_level_reaches_the_engine(server, monkeypatch, level):
    seen = []
    add_request = server.engine.add_request

    def watched(*args, **kwargs):
        request = add_request(*args, **kwargs)
        seen.append(request.max_kv_level)
        return request

    monkeypatch.setattr(server.engine, "add_request", watched)
    assert complete(server, max_kv_level=level).status_code == 200
    assert chat(server, max_kv_level=level).status_code == 200
    assert seen == [level, level]


@pytest.mark.parametrize("include_usage", [False, True])
def test_completion_stream(server, events, include_usage):
    response = complete(server, stream=True, stream_options={"include_usage": include_usage})
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response.text)
    if include_usage:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"] == complete(server, cache_salt="other").json()["usage"]
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == list("abcdefgh")
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * 7 + ["length"]


def test_chat_stream(server, events):
    chunks = events(chat(server, stream=True).text)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "abcdefgh"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs(server, events, stream):
    response = complete(server, logprobs=2, max_tokens=3, stream=stream)
    parts = [e["choices"][0]["logprobs"] for e in (events(response.text) if stream else [response.json()])]
    joined = {key: [x for part in parts for x in part[key]] for key in parts[0]}
    assert joined == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{"a": -0.5, "b": -9999.0}, {"b": -0.5, "c": -9999.0}, {"c": -0.5, "d": -9999.0}],
        "text_offset": [0, 1, 2],
    }


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(server, events, stream):
    response = chat(server, logprobs=True, top_logprobs=1, max_tokens=2, stream=stream)
    choices = [e["choices"][0] for e in (events(response.text) if stream else [response.json()])]
    content = [entry for c in choices for entry in (c["logprobs"] or {"content": []})["content"]]
    assert [entry["token"] for entry in content] == ["a", "b"]
    top = {"token": "a", "logprob": -0.5, "bytes": [97]}
    assert content[0] == {**top, "top_logprobs": [top]}


def test_second_turn_reports_the_whole_pages_of_the_shared_prefix(server):
    page = server.engine.config.page_size
    first = complete(server, prompt="x" * 30).json()
    text = "x" * 30 + first["choices"][0]["text"]
    again = complete(server, prompt=text + "y" * 9).json()
    # the last token of the first turn was never an input
    expected = math.floor((len(text) - 1) / page) * page
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == expected
    salted = complete(server, prompt=text + "y" * 9, cache_salt="tenant").json()
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_models(server):
    listed = server.client.get("/v1/models").json()
    assert [card["id"] for card in listed["data"]] == ["stub"]
    assert server.client.get("/v1/models/stub").json() == listed["data"][0]
    assert server.client.get("/v1/models/other").status_code == 404


def test_health(server):
    response = server.client.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})
