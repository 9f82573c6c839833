"""The admin API's bearer token: given, from the environment, or kept in a file."""

import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from kvpilot.engine.errors import ConfigError

ENVIRONMENT_VARIABLE = "KVPILOT_ADMIN_TOKEN"
DEFAULT_TOKEN_FILE = Path("~/.kvpilot/admin.token")  # of `autotune serve`, `run` and `knobs` alike
MIN_LENGTH = 16


def resolve_token(
    token: str | None, token_file: Path, environment: Mapping[str, str] = os.environ
) -> tuple[str, bool]:
    """(token, whether it is the one in `token_file`): `token`, else the environment's, else the file's.

    The file is created (mode 0600) if there is none. ConfigError for a token that is short or not
    printable ASCII, and for a file that others may read.
    """
    if token is not None:
        return _checked(token, "admin_token"), False
    if ENVIRONMENT_VARIABLE in environment:
        return _checked(environment[ENVIRONMENT_VARIABLE], ENVIRONMENT_VARIABLE), False
    try:
        return _create(token_file), True
    except FileExistsError:
        return _read(token_file), True
    except OSError as error:
        raise ConfigError(
            f"admin_token_file={str(token_file)!r} cannot be written: {error.strerror}"
        ) from error


def _create(path: Path) -> str:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    token = secrets.token_urlsafe(32)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(token + "\n")
    return token


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            mode = os.fstat(file.fileno()).st_mode
            token = file.read().strip()
    except OSError as error:
        raise ConfigError(f"admin_token_file={str(path)!r} cannot be read: {error.strerror}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"admin_token_file={str(path)!r} is open to others: chmod 600 it")
    return _checked(token, f"admin_token_file={str(path)!r}")


def _checked(token: str, source: str) -> str:
    """Headers carry printable ASCII; the value itself never goes into a message."""
    if len(token) < MIN_LENGTH or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{source} is not a usable token: expected {MIN_LENGTH} or more ASCII characters, no spaces"
        )
    return token
