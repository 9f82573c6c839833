"""Where the admin token comes from."""

import stat

import pytest

from kvpilot.engine.errors import ConfigError
from kvpilot.engine.server.token import ENVIRONMENT_VARIABLE, resolve_token

GIVEN = "given-token-0123456789"


def test_order_of_sources(tmp_path):
    path = tmp_path / "token"
    environment = {ENVIRONMENT_VARIABLE: "environment-token-0123"}
    assert resolve_token(GIVEN, path, environment) == (GIVEN, False)
    assert resolve_token(None, path, environment) == ("environment-token-0123", False)
    assert not path.exists()


def test_file_is_made_for_the_owner_only_and_kept(tmp_path):
    path = tmp_path / "state" / "token"
    token, from_file = resolve_token(None, path, {})
    assert from_file
    assert len(token) >= 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert resolve_token(None, path, {}) == (token, True)


def test_file_open_to_others_is_refused(tmp_path):
    path = tmp_path / "token"
    path.write_text(GIVEN)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        resolve_token(None, path, {})


@pytest.mark.parametrize(
    "token", ["", "short", "with space 0123456789", "\u00fcmlaut-0123456789abc", "x" * 20 + "\n"]
)
def test_unusable_token_is_refused_without_showing_it(tmp_path, token):
    with pytest.raises(ConfigError) as caught:
        resolve_token(token, tmp_path / "token", {})
    assert not token or token not in str(caught.value)


def test_unwritable_place(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Not a directory"):
        resolve_token(None, tmp_path / "file" / "token", {})
