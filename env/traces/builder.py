"""Collects records in any order and makes a trace of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvpilot.env.traces.blocks import Ints, offsets_of, take_ragged, wrong_links
from kvpilot.env.traces.sessions import derive_sessions
from kvpilot.env.traces.source import BadRecord, Source
from kvpilot.env.traces.trace import Trace, TraceError

MAX_TOKENS = 1 << 40


class TraceBuilder:
    """`add` records, then `build`. Sessions and turns are derived from the blocks if a record names no session."""

    def __init__(self, source: Source, block_size: int = 0) -> None:
        self.source = source
        self.block_size = block_size  # 0: not known yet
        self._where: list[int | str] = []
        self._rows: list[tuple[float, ...]] = []
        self._blocks: list[Ints] = []
        self._has_sessions = True

    def __len__(self) -> int:
        return len(self._rows)

    def add(
        self,
        where: int | str,
        *,
        arrival: float,
        prompt_tokens: int,
        output_tokens: int,
        blocks: Sequence[int] | Ints,
        session: int | None = None,
        turn: int = 1,
        tenant: int = 0,
        think: float = np.nan,
    ) -> None:
        """Raises BadRecord if the number of full blocks is not what the prompt has."""
        full = prompt_tokens // self.block_size
        if len(blocks) != full:
            raise BadRecord(
                f"{len(blocks)} blocks are invalid: expected {full} of {self.block_size} tokens "
                f"in a prompt of {prompt_tokens}"
            )
        if max(prompt_tokens, output_tokens) > MAX_TOKENS:
            raise BadRecord(f"a length of {max(prompt_tokens, output_tokens)} tokens is beyond {MAX_TOKENS}")
        self._has_sessions &= session is not None
        self._where.append(where)
        self._rows.append((arrival, prompt_tokens, output_tokens, session or 0, turn, tenant, think))
        self._blocks.append(np.asarray(blocks, dtype=np.int64))

    def shift(self, first: int, stop: int, seconds: float) -> None:
        """Let the records [first, stop), in order of adding, arrive later."""
        for k in range(first, stop):
            arrival, *rest = self._rows[k]
            self._rows[k] = (arrival + seconds, *rest)

    def build(self, provenance: Sequence[Mapping[str, Any]] = (), **read: Any) -> Trace:
        """The trace; `read` goes into the provenance of this reading."""
        if not self._rows:
            raise self.source_error("no request in it")
        columns = [np.asarray(column) for column in zip(*self._rows, strict=True)]
        ids = np.concatenate(self._blocks)
        offsets = offsets_of([len(blocks) for blocks in self._blocks])
        self._blocks.clear()
        keep = self._unchained(columns[0], ids, offsets)
        ids, offsets = take_ragged(ids, offsets, keep)
        arrival, prompt, output, session, turn, tenant, think = (column[keep] for column in columns)
        if not self._has_sessions:
            session, turn = derive_sessions(ids, offsets)
        entry = self.source.provenance(num_requests=len(keep), **read)
        return Trace(
            arrival_seconds=arrival,
            prompt_tokens=prompt,
            output_tokens=output,
            block_ids=ids,
            block_offsets=offsets,
            block_size=self.block_size,
            session=session,
            turn=turn,
            tenant=tenant,
            think_seconds=think,
            provenance=(*provenance, entry),
        )

    def _unchained(self, arrivals: np.ndarray, ids: Ints, offsets: Ints) -> Ints:
        """Rows in order of arrival, without those whose blocks contradict an earlier line."""
        keep = np.arange(len(arrivals))
        while len(keep):
            kept_ids, kept_offsets = take_ragged(ids, offsets, keep)
            wrong = np.flatnonzero(wrong_links(kept_ids, kept_offsets))
            if not len(wrong):
                break
            rows = np.unique(np.searchsorted(kept_offsets, wrong, "right") - 1)
            for row, at in zip(rows, wrong[np.searchsorted(wrong, kept_offsets[rows])], strict=True):
                self.source.reject(
                    self._where[keep[row]],
                    f"field blocks: id {kept_ids[at]} follows other blocks than before: expected chained ids "
                    "(equal id, equal prompt up to there)",
                )
            keep = np.delete(keep, rows)
        return keep[np.argsort(arrivals[keep], kind="stable")]

    def source_error(self, problem: str) -> TraceError:
        skipped = f" ({self.source.num_skipped} bad ones skipped)" if self.source.num_skipped else ""
        return TraceError(f"{self.source.path}: {problem}{skipped}")
