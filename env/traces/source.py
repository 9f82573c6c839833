"""Files as they come: plain, gzip or xz, recognised by content; every complaint names file, line and field."""

import gzip
import hashlib
import json
import lzma
import os
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from kvpilot.env.traces.trace import TraceError

GZIP, XZ = b"\x1f\x8b", b"\xfd7zXZ\x00"
DAMAGED = (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile)


class BadRecord(Exception):  # noqa: N818 - becomes a TraceError, or a count
    """A record cannot be used: which field, and why."""


def check_input(path: Path) -> None:
    """Raises TraceError for what is no file with something in it that may be read."""
    if path.is_dir():
        raise TraceError(f"{path}: is a folder: expected a file")
    if not path.exists():
        raise TraceError(f"{path}: no such file")
    if not path.is_file():
        raise TraceError(f"{path}: is a device or a pipe: expected a regular file")
    if not os.access(path, os.R_OK):
        raise TraceError(f"{path}: may not be read: see its permissions")
    if path.stat().st_size == 0:
        raise TraceError(f"{path}: the file is empty: there is no request in it")


class Source:
    """One input file, and the count of what was dropped from it."""

    def __init__(self, path: Path, *, skip_bad: bool = False) -> None:
        self.path = path
        self.skip_bad = skip_bad
        self.num_skipped = 0
        self.first_skipped = ""
        check_input(path)

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """The content, decompressed."""
        with self.path.open("rb") as raw:
            magic = raw.read(6)
            raw.seek(0)
            if magic.startswith(GZIP):
                with gzip.GzipFile(fileobj=raw) as stream:
                    yield cast(BinaryIO, stream)
            elif magic == XZ:
                with lzma.LZMAFile(raw) as stream:
                    yield cast(BinaryIO, stream)
            else:
                yield raw

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Line numbers from 1 and lines that are not blank."""
        number = 0
        with self.open() as stream:
            try:
                for number, line in enumerate(stream, 1):
                    if line.strip():
                        yield number, line
            except DAMAGED as error:
                self.reject(number + 1, f"the compressed data is truncated or damaged ({error})")

    def reject(self, where: int | str, problem: str | BadRecord) -> None:
        """Raise, or count and go on if bad records are to be skipped. `where` is a line number or a place."""
        place = f"line {where}" if isinstance(where, int) else where
        message = f"{self.path}: {place}: {problem}"
        if not self.skip_bad:
            raise TraceError(message)
        self.num_skipped += 1
        self.first_skipped = self.first_skipped or message

    def provenance(self, file_format: str, num_requests: int, **parameters: Any) -> dict[str, Any]:
        with self.path.open("rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        entry = {"step": "read", "file": self.path.name, "sha256": sha256, "format": file_format}
        entry |= {"requests": num_requests, **parameters}
        if self.num_skipped:
            entry |= {"skipped": self.num_skipped, "first_skipped": self.first_skipped}
        return entry


# ---------------------------------------------------------------------- fields of a record
def parse_object(text: bytes) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadRecord(f"not JSON ({error.msg} at character {error.pos + 1})") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, endless digits, endless nesting
        raise BadRecord(f"not JSON ({error})") from None
    if not isinstance(record, dict):
        raise BadRecord(f"{shorten(record)} is not a JSON object")
    return record


def integer(record: dict[str, Any], name: str, *, low: int, bits: int = 63) -> int:
    value = _present(record, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < low or value >> bits:
        raise BadRecord(
            f"field {name}={shorten(value)} is invalid: expected an integer >= {low} of {bits} bits"
        )
    return value


def number(record: dict[str, Any], name: str, *, low: float) -> float:
    value = _present(record, name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value < float("inf"):
        raise BadRecord(f"field {name}={shorten(value)} is invalid: expected a number >= {low:g}")
    return float(value)


def block_list(record: dict[str, Any], name: str) -> list[int]:
    value = _present(record, name)
    good = isinstance(value, list) and all(type(x) is int and 0 <= x < 1 << 63 for x in value)
    if not good:
        raise BadRecord(f"field {name}={shorten(value)} is invalid: expected a list of integers in [0, 2^63)")
    return value


def _present(record: dict[str, Any], name: str) -> Any:
    if name not in record:
        raise BadRecord(f"field {name} is missing")
    return record[name]


def shorten(value: object, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def archive_members(source: Source, prefix: str, suffix: str) -> Iterator[tuple[str, bytes]]:
    """Files of an archive by name, or the one file that it is."""
    try:
        with source.open() as stream:
            is_archive = stream.read(512)[257:262] == b"ustar"
        with source.open() as stream:
            if not is_archive:
                yield source.path.name, stream.read()
                return
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for member in archive:
                    if member.name.startswith(prefix) and member.name.endswith(suffix):
                        content = archive.extractfile(member)
                        if content is not None:
                            yield member.name, content.read()
    except (*DAMAGED, tarfile.TarError) as error:
        source.reject("archive", f"truncated or damaged ({error})")
