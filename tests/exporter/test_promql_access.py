"""A Prometheus that asks who is there: tenants and tokens in headers, as Mimir, Thanos and their proxies want them."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvpilot.exporter.promql import PromSource
from kvpilot.exporter.source import SourceError

TOKEN = "a-token-for-tests-only"


class Gateway(ThreadingHTTPServer):
    token = TOKEN

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def gateway():
    """Answers as Prometheus does, but only to who shows the token and a tenant. It knows of no series."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            shown = self.headers.get("Authorization"), self.headers.get("X-Scope-OrgID")
            allowed = shown == (f"Bearer {server.token}", "team-a")
            result = [time.time(), "1.0"] if "query=time" in self.path else []
            kind = "scalar" if result else "matrix"
            body = {"status": "success", "data": {"resultType": kind, "result": result}}
            raw = json.dumps(body).encode() if allowed else b"who are you?"
            self.send_response(200 if allowed else 401)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

    server = Gateway(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def asked(gateway, **options) -> str:
    source = PromSource(gateway.url, **options)
    with pytest.raises(SourceError) as refused:
        source.window(60.0)
    source.close()
    assert TOKEN not in str(refused.value)
    return str(refused.value)


def test_headers_are_sent_with_every_query(gateway):
    tenant = {"X-Scope-OrgID": "team-a"}
    assert "who are you?" in asked(gateway)
    assert "who are you?" in asked(gateway, headers=tenant)
    assert "no samples" in asked(gateway, headers={**tenant, "Authorization": f"Bearer {TOKEN}"})


def test_the_token_file_is_read_again_for_every_query(gateway, tmp_path):
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    source = PromSource(gateway.url, headers={"X-Scope-OrgID": "team-a"}, bearer_token_file=path)
    with pytest.raises(SourceError, match="no samples"):
        source.window(60.0)
    gateway.token = "renewed"
    with pytest.raises(SourceError, match="who are you"):
        source.window(60.0)
    path.write_text("renewed")
    with pytest.raises(SourceError, match="no samples"):
        source.window(60.0)
    path.write_text("two words")
    with pytest.raises(SourceError, match="expected one token"):
        source.window(60.0)
    path.unlink()
    with pytest.raises(SourceError, match="cannot be read"):
        source.window(60.0)
    source.close()
