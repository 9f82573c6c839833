import os
import signal

import httpx
import pytest

from kvpilot.agent.launch import LaunchError, launched


def test_a_server_that_dies_is_reported_with_the_end_of_its_log(tmp_path):
    with pytest.raises(LaunchError, match="page_size=3") as caught, launched(
        ["--page-size", "3"], directory=tmp_path
    ):  # fmt: skip
        pass
    assert "ended with code 2" in str(caught.value)
    assert not (tmp_path / "server.token").exists()


@pytest.mark.model
@pytest.mark.e2e
def test_a_server_serves_until_it_is_stopped(tmp_path):
    with launched(["--pool-mb", "32"], directory=tmp_path) as server:
        assert oct(server.token_file.stat().st_mode)[-3:] == "600"
        answer = httpx.get(f"{server.url}/v1/models", trust_env=False).json()
        assert answer["data"][0]["id"] == "smollm2"
        assert httpx.get(f"{server.admin_url}/admin/knobs", trust_env=False).status_code == 401
    assert server.process.returncode == 0
    assert "admin API" in server.tail()


@pytest.mark.model
@pytest.mark.e2e
def test_a_server_killed_from_outside_is_noticed(tmp_path):
    with launched(["--pool-mb", "32"], directory=tmp_path) as server:
        server.check_alive()
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        with pytest.raises(LaunchError, match="ended with code -9"):
            server.check_alive()
