"""Under which code a simulation was made: what another one gave is no result of this one."""

import hashlib
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

DECIDING = ("engine", "env")  # packages whose code decides what a simulation gives
NOT_DECIDING = (
    "server",
    "kernels",
    "model",
    "runners",
    "codecs",
    "replay",
    "pages",
    "calibration",
    "__pycache__",
)


@cache
def code_digest() -> str:
    """Of the sources that decide what a simulation gives."""
    digest = hashlib.sha256()
    for package in DECIDING:
        _add(files(f"kvpilot.{package}"), digest)
    return digest.hexdigest()


def _add(folder: Traversable, digest: Any) -> None:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir() and entry.name not in NOT_DECIDING:
            _add(entry, digest)
        elif entry.name.endswith((".py", ".json")):
            digest.update(entry.name.encode())
            digest.update(entry.read_bytes())
