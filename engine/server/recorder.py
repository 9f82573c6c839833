"""`autotune serve --record`: what was asked for, as a trace to replay. Lengths, hashes and times, never text."""

import contextlib
import json
import logging
import os
import time
from pathlib import Path
from types import TracebackType

from kvpilot.engine.errors import ConfigError
from kvpilot.engine.request import Request

log = logging.getLogger(__name__)

VERSION = 1  # of the file, see kvpilot.env.traces.own_jsonl
ID_BITS = 63


class TrafficRecorder:
    """Appends a JSON line for each request that ends after it was admitted, at once and as a whole.

    What cannot be written is lost and counted (`num_lost`), and said once: serving goes on. Block ids are the
    first 63 bits of the hashes of the prompt's full pages. They do not tell the text, but whoever can guess a
    whole prompt can confirm it. `clock_offset` turns the engine's clock into unix seconds.
    """

    def __init__(self, path: Path, *, page_size: int, clock_offset: float) -> None:
        """Raises ConfigError if the file cannot be appended to, or holds something else."""
        self.path = path
        self.num_recorded = 0
        self.num_lost = 0
        self._page_size = page_size
        self._clock_offset = clock_offset
        self._complained = False
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise ConfigError(f"record={str(path)!r} cannot be written: {error.strerror}") from error
        try:
            self._check_continuation()
        except BaseException:
            os.close(self._file)
            raise
        start = {"step": "record", "block_size": page_size, "unix_seconds": round(time.time(), 3)}
        self._append({"kvpilot_trace": VERSION, "provenance": [start]})

    def record(self, request: Request) -> None:
        """Called on the engine thread when a request has ended."""
        if request.first_admission_time is None:
            return
        num_blocks = request.num_prompt_tokens // self._page_size
        done = self._append(
            {
                "arrival": round(request.arrival_time + self._clock_offset, 6),
                "prompt_tokens": request.num_prompt_tokens,
                "output_tokens": max(request.num_output_tokens, 1),
                "block_size": self._page_size,
                "blocks": [_block_id(request.block_hash(index)) for index in range(num_blocks)],
            }
        )
        self.num_recorded += done
        self.num_lost += not done

    def _append(self, record: dict[str, object]) -> bool:
        """One line, or nothing: a part of one is taken back."""
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        try:
            end = os.fstat(self._file).st_size
            written = os.write(self._file, line)
            if written == len(line):
                return True
            os.ftruncate(self._file, end)
            problem = "the disk is full"
        except OSError as error:
            problem = error.strerror or str(error)
        if not self._complained:
            log.error(
                "%s cannot be written (%s): requests are not recorded, serving goes on", self.path, problem
            )
        self._complained = True
        return False

    def _check_continuation(self) -> None:
        """An older recording may be continued if its pages have the same size."""
        head = os.pread(self._file, 4096, 0)
        if not head:
            return
        try:
            first = json.loads(head.split(b"\n")[0])
            block_size = (first["provenance"][0] if "kvpilot_trace" in first else first)["block_size"]
        except (ValueError, LookupError, TypeError):
            raise ConfigError(f"record={str(self.path)!r} is not a recording: name another file") from None
        if block_size != self._page_size:
            raise ConfigError(
                f"record={str(self.path)!r} has pages of {block_size} tokens, this engine {self._page_size}: "
                "name another file"
            )
        if os.pread(self._file, 1, os.fstat(self._file).st_size - 1) != b"\n":  # a line that a crash cut off
            with contextlib.suppress(OSError):  # a full disk: the next line says so
                os.write(self._file, b"\n")

    def __enter__(self) -> "TrafficRecorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)
        log.info("%s: %d requests recorded, %d lost", self.path, self.num_recorded, self.num_lost)


def _block_id(page_hash: object) -> int:
    assert isinstance(page_hash, bytes)
    return int.from_bytes(page_hash[:8]) >> (64 - ID_BITS)
