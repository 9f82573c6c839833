"""The audit log: append-only JSON lines. No audit, no action: a failing write is an AuditError."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvpilot.engine.errors import InputError, KVPilotError


class AuditError(KVPilotError):
    """A line could not be written; the caller must not act."""


class AuditFileError(AuditError, InputError):
    """The file that was named can neither be written nor read, or is none of ours."""


class AuditLog:
    """One writer. Each line is on disk when `write` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self) -> None:
        """Raises AuditFileError if nothing can be written; to be asked before the loop starts."""
        try:
            self._append(b"")
        except OSError as error:
            raise AuditFileError(self._failure(error)) from error

    def write(self, record: dict[str, object]) -> None:
        """Appends one line, or raises AuditError. The file is opened anew each time: it may be rotated."""
        line = json.dumps(record, allow_nan=False, default=str).encode() + b"\n"
        try:
            self._append(line)
        except OSError as error:
            raise AuditError(self._failure(error)) from error

    def _failure(self, error: OSError) -> str:
        return f"audit={str(self.path)!r} cannot be written: {error.strerror or error}"

    def _append(self, line: bytes) -> None:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o640)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":  # torn by a crash or a full disk
                line = b"\n" + line
            if os.write(descriptor, line) != len(line):
                raise OSError("short write: no space left?")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class AuditLine(NamedTuple):
    number: int  # from 1, in the file
    record: dict[str, Any]

    @property
    def kind(self) -> str:
        return str(self.record.get("kind", ""))


def read_audit(path: Path, on_torn: Callable[[int], None] = lambda number: None) -> Iterator[AuditLine]:
    """The records in order. A line torn by a crash or a full disk is told by its number and left out.

    Raises AuditFileError if the file cannot be read, or holds no record at all.
    """
    found = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    record = json.loads(line)
                except ValueError:
                    on_torn(number)
                    continue
                if isinstance(record, dict) and "kind" in record:
                    found += 1
                    yield AuditLine(number, record)
                else:
                    on_torn(number)
    except OSError as error:
        raise AuditFileError(f"audit={str(path)!r} cannot be read: {error.strerror}") from error
    if not found:
        raise AuditFileError(f"audit={str(path)!r} holds no decision: expected what `autotune run` wrote")
