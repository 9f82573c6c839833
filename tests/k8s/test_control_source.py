"""The sidecar's document without an API server (test_live_operator.py has one)."""

import socket
import ssl
from collections.abc import Iterator
from typing import Any

import pytest

from kvpilot.engine.errors import ConfigError
from kvpilot.k8s.control_source import ControlSource, WatchConfig, watch_config_in_pod


@pytest.fixture
def source(tmp_path) -> Iterator[Any]:
    """Its API server refuses connections; its file is `control.yaml`."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    (tmp_path / "token").write_text("a token")
    watch = WatchConfig(
        config_map="engine-control",
        namespace="n",
        server=f"https://127.0.0.1:{port}",
        token_file=tmp_path / "token",
        ca_file=ssl.get_default_verify_paths().openssl_cafile,  # pyright: ignore[reportArgumentType]
    )
    source = ControlSource(watch, file=tmp_path / "control.yaml")
    source.start(patience_seconds=30)
    yield source
    source.close()


def test_the_file_counts_while_the_api_does_not_answer(source, tmp_path):
    assert not source.refresh()
    before = source.document
    assert before is None
    assert "control.yaml" in source.problem
    (tmp_path / "control.yaml").write_text("revision: 4\nmode: auto\n")
    assert source.refresh()
    assert (source.document.mode, source.problem) == ("auto", "")
    assert not source.refresh()


@pytest.mark.parametrize("bad", ["mode: auto", "{", "revision: 3\nmode: auto\n"])
def test_a_bad_or_older_document_does_not_replace_a_good_one(source, tmp_path, bad):
    (tmp_path / "control.yaml").write_text("revision: 4\nmode: advisory\n")
    source.refresh()
    (tmp_path / "control.yaml").write_text(bad)
    assert not source.refresh()
    assert source.document.mode == "advisory"
    assert source.problem
    (tmp_path / "control.yaml").write_text("revision: 5\nmode: 'off'\n")
    assert source.refresh()
    assert source.problem == ""


def test_a_pod_knows_how_to_reach_its_api_server():
    environment = {
        "KUBERNETES_SERVICE_HOST": "fd00::1",
        "KUBERNETES_SERVICE_PORT": "443",
        "POD_NAMESPACE": "n",
    }
    watch = watch_config_in_pod("engine-control", environment)
    assert (watch.server, watch.namespace) == ("https://[fd00::1]:443", "n")
    with pytest.raises(ConfigError, match="POD_NAMESPACE"):
        watch_config_in_pod("engine-control", {k: v for k, v in environment.items() if k != "POD_NAMESPACE"})
