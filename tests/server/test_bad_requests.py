"""Each thing a client can get wrong has an answer that says what it was, and the server goes on."""

import json

import pytest

COMPLETION = {"model": "stub", "prompt": "Hello", "max_tokens": 2}
JSON = {"Content-Type": "application/json"}
CHAT = {"model": "stub", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


def refuse(server, path, body, status=400):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = server.client.post(path, content=content, headers=JSON)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert server.client.post("/v1/completions", json=COMPLETION).status_code == 200
    return error


@pytest.fixture(scope="module")
def server(run_server):
    """One server for all: none of this may harm it."""
    with run_server() as server:
        yield server


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"model": "stub", "prompt": "x"',
        b"[" * 100_000,
        b'{"model": "stub", "prompt": "\xff"}',
        b'{"model": "stub", "prompt": "x", "temperature": NaN}',
        b'{"model": "stub", "prompt": "x", "temperature": Infinity}',
        b'{"model": "stub", "prompt": "x", "max_tokens": 1' + b"0" * 5000 + b"}",
        b'{"model": "stub", "prompt": "x", "prompt": "y"}',
        b'{"model": "stub", "prompt": "\\ud800"}',
    ],
    ids=lambda body: ascii(body[-30:]),
)
def test_malformed_json(server, body):
    assert "not valid JSON" in refuse(server, "/v1/completions", body)["message"]


@pytest.mark.parametrize(
    ("content_type", "named"),
    [
        (None, "Content-Type is missing"),  # a Blob without a type
        ("", "''"),
        ("text/plain;charset=UTF-8", "'text/plain;charset=UTF-8'"),
        ("application/x-www-form-urlencoded", "'application/x-www-form-urlencoded'"),  # curl -d
        ("text/plain; application/json", "'text/plain; application/json'"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_a_web_page_could_send_unasked_is_refused(server, path, content_type, named):
    headers = {} if content_type is None else {"Content-Type": content_type}
    body = json.dumps(COMPLETION if path == "/v1/completions" else CHAT).encode()
    response = server.client.post(path, content=body, headers=headers)
    assert response.status_code == 415
    message = response.json()["error"]["message"]
    assert named in message
    assert "send application/json" in message


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON"])
def test_json_may_be_called_so_in_any_way(server, content_type):
    body, headers = json.dumps(COMPLETION).encode(), {"Content-Type": content_type}
    assert server.client.post("/v1/completions", content=body, headers=headers).status_code == 200


@pytest.mark.parametrize("body", [b"[]", b"7", b"null", b'"x"'])
def test_json_that_is_no_object(server, body):
    assert "JSON object" in refuse(server, "/v1/chat/completions", body)["message"]


@pytest.mark.parametrize(("path", "good"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 10**9),
        ("max_tokens", 10**400),
        ("max_tokens", 1.5),
        ("max_tokens", "8"),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", 10**400),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("top_k", 10**30),
        ("seed", -(2**63) - 1),
        ("seed", 2**63),
        ("stop", ""),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop", 7),
        ("stream", "yes"),
        ("stream_options", []),
        ("stop_token_ids", [-1]),
        ("cache_salt", 5),
        ("max_kv_level", -1),
        ("max_kv_level", 99),
        ("max_kv_level", True),
        ("max_kv_level", 1.0),
        ("max_kv_level", "0"),
        ("model", None),
        ("n", 2),
        ("n", True),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("logit_bias", {"5": 1}),
        ("tools", [{"type": "function"}]),
        ("response_format", {"type": "json_object"}),
        ("no_such_field", 1),
        ("min_p", 0.1),
        ("logprobs", -1),
        ("logprobs", 21),
    ],
)
def test_bad_value_is_named(server, path, good, field, value):
    error = refuse(server, path, {**good, field: value})
    assert error["param"].split(".")[0] == field
    assert field in error["message"]


@pytest.mark.parametrize(
    "prompt", [None, 5, "", [], [-1], [10**6], [10**30], ["a", "b"], [True], [["x"]], {}]
)
def test_bad_prompt(server, prompt):
    assert refuse(server, "/v1/completions", {**COMPLETION, "prompt": prompt})["param"].startswith("prompt")


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hi",
        [5],
        [{}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "wizard", "content": "x"}],
        [{"role": "user", "content": "x", "extra": 1}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    ],
)
def test_bad_messages(server, messages):
    assert refuse(server, "/v1/chat/completions", {**CHAT, "messages": messages})["param"].startswith(
        "messages"
    )


def test_nested_unknown_field_is_named_with_its_path(server):
    error = refuse(server, "/v1/completions", {**COMPLETION, "stream_options": {"every": 1}})
    assert error["message"] == "unknown field 'stream_options.every'"


def test_missing_field(server):
    assert refuse(server, "/v1/completions", {"model": "stub"})["message"] == "field 'prompt' is missing"


def test_top_logprobs_alone(server):
    assert refuse(server, "/v1/chat/completions", {**CHAT, "top_logprobs": 2})["param"] == "top_logprobs"


def test_unknown_model(server):
    error = refuse(server, "/v1/completions", {**COMPLETION, "model": "gpt-9"}, status=404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'stub'" in error["message"]


@pytest.mark.parametrize("prompt", ["x" * 30_000, [5] * 100_000], ids=["text", "token ids"])
def test_prompt_beyond_the_context_says_count_and_limit(server, prompt):
    message = refuse(server, "/v1/completions", {**COMPLETION, "prompt": prompt})["message"]
    assert f"{len(prompt)} tokens" in message
    assert str(server.engine.max_model_len - 1) in message


def test_megabytes_are_refused_by_their_size(server):
    message = refuse(server, "/v1/completions", {**COMPLETION, "prompt": "x" * (4 << 20)})["message"]
    assert f"more than {(4 << 20) // 64} tokens" in message


@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_a_million_bad_entries_give_one_error(server, field):
    path = "/v1/completions" if field == "prompt" else "/v1/chat/completions"
    good = COMPLETION if field == "prompt" else CHAT
    error = refuse(server, path, {**good, field: [{}] * 1_000_000})
    assert error["param"].startswith(field)
    assert len(error["message"]) < 300


def test_body_beyond_the_limit(server):
    body = json.dumps({**COMPLETION, "prompt": "x" * (9 << 20)}).encode()
    assert refuse(server, "/v1/completions", body, status=413)["code"] == "body_too_large"


def test_unknown_path_and_method(server):
    assert server.client.get("/v1/unknown").json()["error"]["message"] == "Not Found: GET /v1/unknown"
    assert server.client.get("/v1/completions").status_code == 405


def test_admin_is_not_on_the_public_port(server):
    headers = {"Authorization": server.admin.headers["authorization"]}
    for method, path in (("GET", "knobs"), ("PATCH", "knobs"), ("GET", "stats"), ("POST", "check")):
        assert server.client.request(method, f"/admin/{path}", headers=headers).status_code == 404
