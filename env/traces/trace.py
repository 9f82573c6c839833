"""The one in-memory form of recorded traffic: numpy columns, one row per request, blocks as chained ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpilot.engine.errors import InputError
from kvpilot.env.traces.blocks import Floats, Ints, take_ragged, wrong_links
from kvpilot.env.traces.sessions import find_successors


class TraceError(InputError, ValueError):
    """A trace is malformed; the message names file and line or the row, the field and the value."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """N requests in order of arrival. Immutable: the columns are read-only, methods return new traces.

    `block_ids` holds, request after request, one id >= 0 per *full* block of the prompt (`prompt_tokens[i] //
    block_size` of them, at `block_offsets[i]`). Ids are chained: equal id <=> equal tokens from the start of the
    prompt to the end of that block, so an id has one predecessor wherever it occurs. A partial last block has no
    id: a cache of whole pages cannot hit it. What is generated has no id either, until a later prompt repeats it
    (`reply_blocks`). Raises TraceError naming field, row and value.
    """

    arrival_seconds: Floats  # f8[N], sorted
    prompt_tokens: Ints  # i8[N], >= 1
    output_tokens: Ints  # i8[N], >= 1
    block_ids: Ints  # i8[sum of full blocks]
    block_offsets: Ints  # i8[N + 1]
    block_size: int  # tokens per block
    session: Ints  # i8[N]; requests of a session may share blocks that are theirs alone
    turn: Ints  # i4[N], from 1
    tenant: Ints  # i8[N]
    think_seconds: Floats = field(default_factory=lambda: np.empty(0))  # f8[N]; see `closed_loop`
    provenance: tuple[Mapping[str, Any], ...] = ()  # what was read and done, oldest first; JSON values

    def __post_init__(self) -> None:
        if self.think_seconds.size == 0:
            object.__setattr__(self, "think_seconds", np.full(len(self.arrival_seconds), np.nan))
        for name, dtype in COLUMNS.items():
            column = np.ascontiguousarray(getattr(self, name), dtype=dtype)
            column = column.view()  # the caller's array stays writable
            column.flags.writeable = False
            object.__setattr__(self, name, column)
        object.__setattr__(self, "provenance", tuple(self.provenance))
        self._check()

    # ------------------------------------------------------------------ reading
    def __len__(self) -> int:
        return len(self.arrival_seconds)

    @property
    def num_full_blocks(self) -> Ints:
        """i8[N]: full blocks of each prompt."""
        return np.diff(self.block_offsets)

    @property
    def duration_seconds(self) -> float:
        """From the first arrival to the last."""
        return float(self.arrival_seconds[-1] - self.arrival_seconds[0]) if len(self) else 0.0

    @property
    def closed_loop(self) -> bool:
        """Every later turn says how long its user or tool took: `think_seconds` from the end of the turn before."""
        return bool(np.isfinite(self.think_seconds[self.turn > 1]).all())

    def blocks_of(self, index: int) -> Ints:
        """Ids of the full blocks of prompt `index`, in order."""
        return self.block_ids[self.block_offsets[index] : self.block_offsets[index + 1]]

    def reply_blocks(self, index: int) -> Ints:
        """Ids of the full blocks that prompt *and output* of request `index` cover.

        After the blocks of the prompt come those that the next turn reveals: the first later request of the session
        that goes on exactly where this prompt ends, and is long enough to hold the whole reply. What no turn
        reveals gets an id < 0 that occurs nowhere else.
        """
        num_known = int(self.block_offsets[index + 1] - self.block_offsets[index])
        num_total = int(self.prompt_tokens[index] + self.output_tokens[index]) // self.block_size
        fresh = -1 - ((np.int64(index) << 24) + np.arange(num_known, num_total, dtype=np.int64))
        successor = self.successor[index]
        if successor >= 0:
            shown = self.blocks_of(successor)[num_known:num_total]
            fresh[: len(shown)] = shown
        return np.concatenate([self.blocks_of(index), fresh])

    @cached_property
    def successor(self) -> Ints:
        """i8[N]: the request whose prompt continues prompt and reply of this one; -1 if there is none."""
        return find_successors(self)

    # ------------------------------------------------------------------ changing
    def select(self, rows: NDArray[Any] | Sequence[int]) -> "Trace":
        """The requests at these indices (or where a mask is true), in order of arrival. Ids stay."""
        rows = np.asarray(rows)
        rows = np.flatnonzero(rows) if rows.dtype == bool else np.unique(rows.astype(np.int64))
        ids, offsets = take_ragged(self.block_ids, self.block_offsets, rows)
        columns = {name: getattr(self, name)[rows] for name in ROW_COLUMNS}
        return Trace(
            **columns,
            block_ids=ids,
            block_offsets=offsets,
            block_size=self.block_size,
            provenance=self.provenance,
        )

    def __getitem__(self, rows: slice) -> "Trace":
        return self.select(np.arange(len(self))[rows])

    def replace(self, **changes: Any) -> "Trace":
        """With other columns. The rows may come in any order of arrival; they are sorted, stably."""
        values = {name: getattr(self, name) for name in (*COLUMNS, "block_size", "provenance")} | changes
        order = np.argsort(values["arrival_seconds"], kind="stable")
        if not np.array_equal(order, np.arange(len(order))):
            for name in ROW_COLUMNS:
                values[name] = np.asarray(values[name])[order]
            values["block_ids"], values["block_offsets"] = take_ragged(
                values["block_ids"], values["block_offsets"], order
            )
        return Trace(**values)

    def noting(self, **step: Any) -> "Trace":
        """The same with one more entry of provenance."""
        return self.replace(provenance=(*self.provenance, step))

    def with_block_size(self, block_size: int) -> "Trace":
        """The same traffic in blocks of another size, a divisor or a multiple of the present one.

        Coarser blocks lose nothing. Finer ones share no more than the coarse ones showed: where two prompts part
        inside a block, all of its parts count as different. Parts of a partial last block are known from the next
        turn (`successor`), otherwise they are new.
        """
        from kvpilot.env.traces.reblock import reblock

        return reblock(self, block_size)

    # ------------------------------------------------------------------ checks
    def _check(self) -> None:
        num = len(self.arrival_seconds)
        if self.block_size < 1:
            raise TraceError(f"block_size={self.block_size} is invalid: expected >= 1")
        for name in COLUMNS:
            column, length = getattr(self, name), num + (name == "block_offsets")
            if column.ndim != 1 or (name != "block_ids" and len(column) != length):
                raise TraceError(f"{name} has shape {column.shape}: expected ({length},), one per request")
        arrivals = self.arrival_seconds
        _refuse("arrival_seconds", arrivals, ~np.isfinite(arrivals), "a finite number of seconds")
        _refuse("arrival_seconds", arrivals[1:], np.diff(arrivals) < 0, "not before the request ahead", 1)
        for name in ("prompt_tokens", "output_tokens", "turn"):
            _refuse(name, getattr(self, name), getattr(self, name) < 1, ">= 1")
        for name in ("session", "tenant"):
            _refuse(name, getattr(self, name), getattr(self, name) < 0, ">= 0")
        _refuse("think_seconds", self.think_seconds, self.think_seconds < 0, ">= 0, or NaN for unknown")
        if self.block_offsets[0] != 0 or self.block_offsets[-1] != len(self.block_ids):
            ends = f"from {self.block_offsets[0]} to {self.block_offsets[-1]}"
            raise TraceError(f"block_offsets go {ends}: expected from 0 to {len(self.block_ids)}")
        counts = self.num_full_blocks
        wrong = counts != self.prompt_tokens // self.block_size
        _refuse("blocks", counts, wrong, f"one per {self.block_size} tokens of the prompt")
        _check_chains(self.block_ids, self.block_offsets)


COLUMNS: dict[str, type] = {
    "arrival_seconds": np.float64,
    "prompt_tokens": np.int64,
    "output_tokens": np.int64,
    "block_ids": np.int64,
    "block_offsets": np.int64,
    "session": np.int64,
    "turn": np.int32,
    "tenant": np.int64,
    "think_seconds": np.float64,
}
ROW_COLUMNS = tuple(name for name in COLUMNS if not name.startswith("block_"))


def _refuse(name: str, column: NDArray[Any], wrong: NDArray[np.bool_], expected: str, shift: int = 0) -> None:
    if wrong.any():
        row = int(np.argmax(wrong))
        raise TraceError(f"{name}={column[row]} of request {row + shift} is invalid: expected {expected}")


def _check_chains(block_ids: Ints, block_offsets: Ints) -> None:
    """Raise TraceError unless every id has the same predecessor wherever it occurs."""

    def place(wrong: NDArray[np.bool_]) -> str:
        at = int(np.argmax(wrong))
        row = int(np.searchsorted(block_offsets, at, "right")) - 1
        return f"blocks: id {block_ids[at]} of request {row}"

    if (negative := block_ids < 0).any():
        raise TraceError(f"{place(negative)} is invalid: expected >= 0")
    if (wrong := wrong_links(block_ids, block_offsets)).any():
        raise TraceError(
            f"{place(wrong)} follows different blocks in different requests: "
            "expected chained ids (equal id, equal prompt up to there)"
        )
