"""The sessions of a trace file as episodes use them: in pages, filtered by length, split by session, read once."""

import hashlib
from functools import lru_cache
from pathlib import Path

import numpy as np

from kvpilot.engine.errors import ConfigError
from kvpilot.engine.model.fetch import default_cache_dir
from kvpilot.env.traces.blocks import densify
from kvpilot.env.traces.compose import drop_longer, shared_blocks
from kvpilot.env.traces.files import write_trace
from kvpilot.env.traces.readers import read_trace
from kvpilot.env.traces.trace import Trace, TraceError

SPLITS = {"train": range(60), "validation": range(60, 80), "test": range(80, 100)}  # of 100 classes
MIN_SESSIONS = 8  # fewer in a split are no sample
COPY_BITS, STREAM_BITS = 40, 56  # of a block's id: trace's own id, copy, stream


def split_class(file: str, session: int) -> int:
    """0 .. 99, from file name and session number alone."""
    digest = hashlib.blake2b(f"{Path(file).name}:{session}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 100


class SessionTable:
    """A trace in pages and, per split, the rows of each session. Shared by all episodes of a process; immutable."""

    def __init__(self, trace: Trace, file: str, digest: str) -> None:
        self.trace, self.file, self.digest = trace, file, digest
        dense, num_ids = densify(trace.block_ids)
        self.trace = trace.replace(block_ids=dense)
        self.is_shared = shared_blocks(self.trace, num_ids)
        self._by_class: dict[int, list[list[int]]] = {}
        rows: dict[int, list[int]] = {}
        for row, session in enumerate(trace.session.tolist()):
            rows.setdefault(session, []).append(row)
        for session, members in rows.items():
            self._by_class.setdefault(split_class(file, session), []).append(members)
        self.think_seconds: list[float] = trace.think_seconds.tolist()
        self.arrival_seconds: list[float] = trace.arrival_seconds.tolist()
        self.prompt_tokens: list[int] = trace.prompt_tokens.tolist()
        self.output_tokens: list[int] = trace.output_tokens.tolist()

    def sessions(self, split: str) -> list[list[int]]:
        """Rows of each session of a split. Raises ConfigError for an unknown split, TraceError for a thin one."""
        if split not in SPLITS:
            raise ConfigError(f"split={split!r} is invalid: expected {', '.join(SPLITS)}")
        found = [rows for klass in SPLITS[split] for rows in self._by_class.get(klass, [])]
        if len(found) < MIN_SESSIONS:
            total = sum(len(group) for group in self._by_class.values())
            raise TraceError(
                f"{self.file}: too short to split: {len(found)} of its {total} sessions are in {split}, "
                f"expected at least {MIN_SESSIONS}"
            )
        return found

    def blocks(self, row: int, *, stream: int, copy: int, serial: int) -> list[int]:
        """Ids of the full pages of prompt and reply. Copies share only what different sessions share."""
        ids = self.trace.reply_blocks(row)
        known = ids >= 0
        offset = stream << STREAM_BITS
        named = ids + offset
        if copy:
            private = known.copy()
            private[known] = ~self.is_shared[ids[known]]
            named[private] += copy << COPY_BITS
        if not known.all():
            named[~known] = -1 - ((serial << 24) + np.arange(len(ids))[~known])
        return named.tolist()


def load_table(folder: Path, file: str, *, page_size: int, max_tokens: int) -> SessionTable:
    """Reads and pages the file, or what an earlier process left in the cache. Raises TraceError."""
    path = folder / file
    if not folder.is_dir():
        raise TraceError(f"folder={str(folder)!r} is invalid: there is no such folder of traces")
    if not path.is_file():
        raise TraceError(f"{path}: no such file")
    stat = path.stat()
    return _load(path, file, page_size, max_tokens, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=16)
def _load(path: Path, file: str, page_size: int, max_tokens: int, _size: int, _mtime: int) -> SessionTable:
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    paged = default_cache_dir() / "paged" / f"{digest[:24]}-{page_size}-{max_tokens}.parquet"
    if paged.is_file():
        return SessionTable(read_trace(paged), file, digest)
    trace = drop_longer(read_trace(path), max_tokens).with_block_size(page_size)
    _keep(trace, paged)
    return SessionTable(trace, file, digest)


def _keep(trace: Trace, path: Path) -> None:
    """A cache that cannot be written is no reason to stop."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_trace(trace, path)
    except (OSError, TraceError):
        return
