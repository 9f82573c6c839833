"""The audit log: append-only JSON lines. No audit, no action: a failing write is an AuditError."""

import json
import os
from pathlib import Path

from kvpilot.engine.errors import KVPilotError


class AuditError(KVPilotError):
    """A line could not be written; the caller must not act."""


class AuditLog:
    """One writer. Each line is on disk when `write` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self) -> None:
        """Raises AuditError if nothing can be written; to be asked before the loop starts."""
        try:
            self._append(b"")
        except OSError as error:
            raise self._failure(error) from error

    def write(self, record: dict[str, object]) -> None:
        """Appends one line, or raises AuditError. The file is opened anew each time: it may be rotated."""
        line = json.dumps(record, allow_nan=False, default=str).encode() + b"\n"
        try:
            self._append(line)
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> AuditError:
        return AuditError(f"audit={str(self.path)!r} cannot be written: {error.strerror or error}")

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
