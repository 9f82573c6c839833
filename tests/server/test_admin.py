"""The admin API: who may use it, what it answers, and that a change is whole or not at all."""

import json
import threading

import pytest

JSON = {"Content-Type": "application/json"}


def test_token_is_required(server):
    for header in (None, "", "Bearer", "Bearer wrong", server.admin.headers["authorization"].lower()):
        headers = {} if header is None else {"Authorization": header}
        for method, path in (("GET", "knobs"), ("PATCH", "knobs"), ("GET", "stats"), ("POST", "check")):
            # the public client: it has no token of its own
            response = server.client.request(method, f"{server.admin_url}/admin/{path}", headers=headers)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"


def test_knobs_come_with_revision_bounds_and_classes(server):
    state = server.admin.get("/admin/knobs").json()
    assert state["revision"] == 1
    assert state["knobs"] == {"ttl_seconds": 0.0, "size_factor": 0.0, "max_batch": 16, "kv_level": 0}
    assert state["requested"] == state["knobs"]
    assert state["deferred"] == []
    assert state["bounds"]["max_batch"] == {"low": 1, "high": 64, "integer": True, "scale": "log"}
    assert state["classes"] == dict.fromkeys(state["knobs"], "hot")


def test_patch_applies_and_reads_back(server):
    body = {"knobs": {"kv_level": 2, "max_batch": 16}, "expected_revision": 1}
    answer = server.admin.patch("/admin/knobs", json=body).json()
    assert answer["revision"] == 2
    assert answer["results"] == {"kv_level": "applied", "max_batch": "unchanged"}
    assert answer["knobs"] == server.admin.get("/admin/knobs").json()["knobs"]
    assert answer["knobs"]["kv_level"] == 2


def test_lowering_max_batch_is_deferred_until_drained(server, wait_until):
    server.runner.step_seconds = 0.02
    body = {"model": "stub", "prompt": "x", "max_tokens": 30}
    posts = [
        threading.Thread(target=server.client.post, args=("/v1/completions",), kwargs={"json": body})
        for _ in range(4)
    ]
    for post in posts:
        post.start()
    wait_until(lambda: len(server.engine.scheduler.running) == 4)
    answer = server.admin.patch("/admin/knobs", json={"knobs": {"max_batch": 1}}).json()
    assert answer["results"] == {"max_batch": "deferred"}
    assert answer["knobs"]["max_batch"] == 4
    for post in posts:
        post.join()
    wait_until(lambda: server.admin.get("/admin/knobs").json()["deferred"] == [])
    assert server.admin.get("/admin/knobs").json()["knobs"]["max_batch"] == 1


def test_stale_revision(server):
    response = server.admin.patch("/admin/knobs", json={"knobs": {"kv_level": 1}, "expected_revision": 7})
    assert response.status_code == 409
    message = "expected_revision=7 is stale: the current revision is 1"
    assert response.json() == {"error": "stale", "expected": 7, "current": 1, "message": message}
    assert server.admin.get("/admin/knobs").json()["knobs"]["kv_level"] == 0


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"knobs": {"kv_level": 3}}, "kv_level"),
        ({"knobs": {"kv_level": 1, "max_batch": 0}}, "max_batch"),
        ({"knobs": {"kv_level": 1, "max_batch": 65}}, "max_batch"),
        ({"knobs": {"max_batch": 2.5}}, "max_batch"),
        ({"knobs": {"kv_level": True}}, "kv_level"),
        ({"knobs": {"kv_level": 1, "ttl_seconds": float("nan")}}, "ttl_seconds"),
        ({"knobs": {"ttl_seconds": float("inf")}}, "ttl_seconds"),
        ({"knobs": {"ttl_seconds": -1}}, "ttl_seconds"),
        ({"knobs": {"size_factor": "1"}}, "size_factor"),
        ({"knobs": {"size_factor": None}}, "size_factor"),
        ({"knobs": {"size_factor": [1] * 1000}}, "size_factor"),
        ({"knobs": {"max_batch": 10**400}}, "max_batch"),
        ({"knobs": {"kv_level": 1, "unknown": 1}}, "unknown"),
        ({"knobs": {"x" * 5000: 1}}, "x" * 200),
        ({"knobs": [1]}, "knobs"),
        ({"knobs": None}, "knobs"),
        ({}, "knobs"),
        ({"kv_level": 1}, "kv_level"),
        ({"knobs": {"kv_level": 1}, "expected_revision": "1"}, "expected_revision"),
        ({"knobs": {"kv_level": 1}, "expected_revision": True}, "expected_revision"),
        ([], "body"),
        (b"{", "body"),
        (b"", "body"),
        (b'{"knobs": {"kv_level": 1, "kv_level": 2}}', "body"),
        (b'{"knobs": {"max_batch": 1' + b"0" * 5000 + b"}}", "body"),
        (b'{"knobs": {"\\ud800": 1}}', "body"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_invalid_change_is_named_and_nothing_is_applied(shared, body, field):
    before = shared.admin.get("/admin/knobs").json()
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = shared.admin.patch("/admin/knobs", content=content, headers=JSON)
    assert response.status_code == 422
    answer = response.json()
    assert set(answer) == {"error", "field", "value", "bounds", "message"}
    assert (answer["error"], answer["field"]) == ("invalid", field)
    assert field in answer["message"]
    assert len(response.content) < 4000
    assert shared.admin.get("/admin/knobs").json() == before


@pytest.fixture(scope="module")
def shared(run_server):
    with run_server() as server:
        yield server


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_change_must_say_that_it_is_json(server, content_type):
    headers = {} if content_type is None else {"Content-Type": content_type}
    response = server.admin.patch("/admin/knobs", content=b'{"knobs": {"kv_level": 1}}', headers=headers)
    assert response.status_code == 415
    assert "send application/json" in response.json()["error"]["message"]
    assert server.admin.get("/admin/knobs").json()["revision"] == 1


def test_body_beyond_the_limit(server):
    response = server.admin.patch("/admin/knobs", content=b" " * (1 << 20), headers=JSON)
    assert response.status_code == 413


def test_of_two_racing_clients_one_wins_each_revision(server):
    rounds = 25
    barrier = threading.Barrier(2)
    wins: list[tuple[int, int]] = []

    def client(offset: int) -> None:
        for revision in range(1, rounds + 1):
            barrier.wait()
            # different values, none of them the current one
            knobs = {"ttl_seconds": float(2 * revision + offset)}
            body = {"knobs": knobs, "expected_revision": revision}
            response = server.admin.patch("/admin/knobs", json=body)
            if response.status_code == 200:
                assert response.json()["revision"] == revision + 1
                wins.append((revision, offset))
            else:
                assert response.status_code == 409
                answer = response.json()
                assert (answer["expected"], answer["current"]) == (revision, revision + 1)
            barrier.wait()

    threads = [threading.Thread(target=client, args=(offset,)) for offset in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(revision for revision, _ in wins) == list(range(1, rounds + 1))
    state = server.admin.get("/admin/knobs").json()
    assert state["revision"] == rounds + 1
    assert state["knobs"]["ttl_seconds"] == 2 * rounds + dict(wins)[rounds]


def test_stats_are_json_for_humans(server):
    server.client.post("/v1/completions", json={"model": "stub", "prompt": "x", "max_tokens": 4})
    stats = server.admin.get("/admin/stats").json()
    assert stats["generation_tokens"] == 4
    assert stats["requests_finished"] == {"length": 1}
    assert stats["time_to_first_token_seconds"]["count"] == 1
    assert stats["page_reuse_gap_seconds"]["p50"] is None


def test_check_reports_broken_books(server):
    assert server.admin.post("/admin/check").json() == {"ok": True}
    server.engine.pool.allocate()  # a page that nobody uses
    response = server.admin.post("/admin/check")
    assert response.status_code == 500
    assert response.json()["error"] == "integrity"
