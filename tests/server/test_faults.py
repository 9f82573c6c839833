"""Clients that go away, too many of them, an engine that fails: each ends in order and frees its pages."""

import asyncio
import json
import logging
import socket
import threading

import httpx
import pytest

from kvpilot.engine.kv.page import PageState

LONG = {"model": "stub", "prompt": "Hello", "max_tokens": 500}


def is_empty(server):
    """No request is left and no page is in use."""
    return not server.engine.has_work() and server.engine.pool.num_pages(PageState.LIVE) == 0


def check(server):
    assert server.admin.post("/admin/check").json() == {"ok": True}


def test_disconnect_in_mid_stream_aborts_and_frees_the_pages(server, wait_until):
    server.runner.step_seconds = 0.01
    with server.client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        assert server.engine.has_work()
    wait_until(lambda: is_empty(server))
    stats = server.engine.snapshot()
    assert stats.value("requests_finished", "abort") == 1
    assert stats.value("generation_tokens") < 500
    check(server)


def test_disconnect_of_a_waiting_client_aborts(server, wait_until):
    server.runner.step_seconds = 0.01
    with pytest.raises(httpx.ReadTimeout):
        server.client.post("/v1/completions", json=LONG, timeout=0.2)
    wait_until(lambda: is_empty(server))
    assert server.engine.snapshot().value("requests_finished", "abort") == 1
    check(server)


def test_disconnect_while_in_the_queue(run_server, wait_until):
    with run_server(max_batch_ceiling=16) as server:
        server.runner.step_seconds = 0.01
        assert server.engine.patch_knobs({"max_batch": 1}, None).results == {"max_batch": "applied"}
        with server.client.stream("POST", "/v1/completions", json={**LONG, "stream": True}):
            with pytest.raises(httpx.ReadTimeout):
                server.client.post("/v1/completions", json=LONG, timeout=0.2)
            wait_until(lambda: not server.engine.scheduler.waiting)
            assert len(server.engine.scheduler.running) == 1
        wait_until(lambda: is_empty(server))


def test_disconnect_in_mid_body_is_no_error_of_ours(server, caplog, wait_until):
    address = httpx.URL(server.url)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
    with socket.create_connection((address.host, address.port)) as client:
        client.sendall(head + b'{"model":')
        wait_until(lambda: server.client.get("/health").status_code == 200)
    assert server.client.post("/v1/completions", json={**LONG, "max_tokens": 1}).status_code == 200
    server.stop()
    server.thread.join(20)  # all handlers have ended
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_bug_in_a_handler_is_logged_and_not_shown(server, monkeypatch, caplog, wait_until):
    def fail():
        raise KeyError("secret")

    monkeypatch.setattr(server.engine, "snapshot", fail)
    response = server.admin.get("/admin/stats")
    assert (response.status_code, response.json()["error"]["message"]) == (500, "internal error")
    wait_until(lambda: "secret" in caplog.text)  # the answer goes out first


def test_a_thousand_requests_are_answered_or_told_to_come_back(run_server):
    with run_server(max_waiting=100) as server:
        server.runner.step_seconds = 0.002

        async def send_all() -> list[httpx.Response]:
            limits = httpx.Limits(max_connections=1000)
            async with httpx.AsyncClient(limits=limits, timeout=60, trust_env=False) as client:
                body = {"model": "stub", "prompt": "Hello", "max_tokens": 4}
                posts = (client.post(f"{server.url}/v1/completions", json=body) for _ in range(1000))
                return await asyncio.gather(*posts)

        responses = asyncio.run(send_all())
        served = [r for r in responses if r.status_code == 200]
        refused = [r for r in responses if r.status_code == 429]
        assert len(served) + len(refused) == 1000
        assert len(served) >= 100
        assert refused
        assert {r.json()["choices"][0]["text"] for r in served} == {"abcd"}
        assert all(int(r.headers["retry-after"]) >= 1 for r in refused)
        assert {r.json()["error"]["code"] for r in refused} == {"queue_full"}
        stats = server.engine.snapshot()
        assert stats.value("requests_finished", "length") == len(served)
        assert stats.value("requests_rejected") == len(refused)
        assert is_empty(server)
        check(server)


def fail_times(server, times):
    left = [times]

    def before_step(batch):
        if left[0] > 0:
            left[0] -= 1
            raise RuntimeError("the runner broke")

    server.runner.before_step = before_step


def test_failed_step_fails_its_requests_and_the_engine_goes_on(server, events, caplog):
    fail_times(server, 1)
    response = server.client.post("/v1/completions", json=LONG)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_failed")
    fail_times(server, 1)
    streamed = events(server.client.post("/v1/chat/completions", json=chat_body(stream=True)).text)
    assert streamed[-1]["error"]["code"] == "engine_failed"
    assert "the runner broke" in caplog.text
    assert server.client.post("/v1/completions", json={**LONG, "max_tokens": 1}).status_code == 200
    assert is_empty(server)
    assert server.engine.snapshot().value("requests_finished", "error") == 2
    check(server)


def chat_body(**fields):
    return {"model": "stub", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, **fields}


def test_engine_that_keeps_failing_is_reported_unhealthy(server, wait_until):
    fail_times(server, 10**9)
    for _ in range(3):
        assert server.client.post("/v1/completions", json=LONG).status_code in (500, 503)
    wait_until(lambda: server.client.get("/health").status_code == 503)
    assert server.client.get("/health").json() == {"status": "failed"}
    refused = server.client.post("/v1/completions", json=LONG)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert server.client.get("/metrics").status_code == 200


def test_scrapes_under_load_are_whole(server):
    from kvpilot.exporter.scrape import Scraper

    server.runner.step_seconds = 0.001
    done = threading.Event()

    async def load() -> None:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            posts = (client.post(f"{server.url}/v1/completions", json=LONG) for _ in range(32))
            assert {r.status_code for r in await asyncio.gather(*posts)} == {200}
        done.set()

    thread = threading.Thread(target=lambda: asyncio.run(load()))
    thread.start()
    with Scraper(f"{server.url}/metrics") as scraper:
        snapshots = [scraper.snapshot()]
        while not done.is_set():
            snapshots.append(scraper.snapshot())
        snapshots.append(scraper.snapshot())
    thread.join()
    tokens = [s.value("generation_tokens") for s in snapshots]
    assert tokens == sorted(tokens)
    assert len(set(tokens)) > 5  # it was under load
    assert tokens[-1] == 32 * 500
    idle = server.engine.snapshot()
    assert {**snapshots[-1].values} == {**idle.values}
    assert snapshots[-1].histograms == idle.histograms


def test_knobs_change_under_load_without_a_loss(server):
    results = []

    async def load() -> None:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            posts = [client.post(f"{server.url}/v1/completions", json=LONG) for _ in range(32)]
            results.extend(r.json() for r in await asyncio.gather(*posts))

    thread = threading.Thread(target=lambda: asyncio.run(load()))
    thread.start()
    number = 0
    while thread.is_alive():
        number += 1
        knobs = {"max_batch": 1 + number % 16, "kv_level": number % 3, "size_factor": number % 5 / 4}
        answer = server.admin.patch("/admin/knobs", json={"knobs": knobs})
        assert answer.status_code == 200
        assert answer.json()["knobs"]["kv_level"] == knobs["kv_level"]
        check(server)
    thread.join()
    assert [r["usage"]["completion_tokens"] for r in results] == [500] * 32
    state = json.loads(server.admin.get("/admin/knobs").text)
    assert state["deferred"] == []
    assert state["knobs"] == state["requested"]
