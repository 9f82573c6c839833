"""Attention of one step's tokens over their paged, mixed-precision K and V.

Shape suffixes: T tokens of the step, H heads, D head_dim, S tokens of one sequence, B sequences.
A step is planned once and run for every layer. Sequences that compute one token go through one decode
kernel that reads the codes; longer chunks read a dense copy of their pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvpilot.engine import kernels
from kvpilot.engine.kernels import PageTable, RopeTables, page_cells
from kvpilot.engine.kv.formats import PageShape
from kvpilot.engine.kv.torch_storage import TorchStorage
from kvpilot.engine.request import ScheduledRequest


@dataclass(frozen=True, kw_only=True)
class PrefillChunk:
    """Rows [begin, end) of the step compute positions `start` onwards of one sequence."""

    begin: int
    end: int
    start: int
    cells: NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence up to the end of the chunk."""
        return self.start + self.end - self.begin


@dataclass(frozen=True, kw_only=True)
class AttentionPlan:
    """What every layer of one step needs to know; valid until a page is converted or moved."""

    positions: NDArray[np.int64]
    places: NDArray[np.int64]  # payload offset of the token's page, index within the page
    decode_rows: slice | Tensor  # rows of the step that the table's sequences compute
    decode_table: PageTable | None
    chunks: tuple[PrefillChunk, ...]


def rope_tables(inverse_frequencies: Sequence[float], max_position: int) -> RopeTables:
    """Tables for positions 0 .. max_position - 1; the angles are computed in float64."""
    positions = torch.arange(max_position, dtype=torch.float64)
    angles = positions[:, None] * torch.tensor(inverse_frequencies, dtype=torch.float64)
    return RopeTables(angles.cos().float(), angles.sin().float())


class PagedAttention:
    """Writes K and V of a step into its pages and attends over all of them.

    `num_heads` are query heads. K and Q are rotated by the Hadamard basis after RoPE; V is expected to arrive in that
    basis, and the output is left in it.
    """

    def __init__(
        self,
        shape: PageShape,
        num_heads: int,
        storage: TorchStorage,
        rope: RopeTables,
    ) -> None:
        self._shape = shape
        self._num_heads = num_heads
        self._storage = storage
        self._rope = rope

    def plan(self, batch: Sequence[ScheduledRequest]) -> AttentionPlan:
        """Rows follow the batch, request after request. Call it again when pages have changed."""
        return plan_step(batch, self._shape.page_size, len(self._rope.cos))

    def __call__(self, layer: int, qkv_TX: Tensor, plan: AttentionPlan) -> Tensor:
        """qkv [T, (Hq + 2 Hkv) * D] before RoPE -> attention output [T, Hq * D], in the dtype of qkv."""
        q_THD = kernels.rope_rotate_write(
            qkv_TX, plan.positions, plan.places, self._rope, self._storage, layer, self._num_heads
        )
        if plan.decode_table is not None and not plan.chunks:
            return kernels.decode_attention(q_THD, self._storage, layer, plan.decode_table).flatten(1)
        out_THD = torch.empty_like(q_THD)
        if plan.decode_table is not None:
            q_BHD = q_THD[plan.decode_rows]
            out_THD[plan.decode_rows] = kernels.decode_attention(
                q_BHD, self._storage, layer, plan.decode_table
            )
        for chunk in plan.chunks:
            rows = slice(chunk.begin, chunk.end)
            out_THD[rows] = kernels.prefill_attention(
                q_THD[rows], self._storage, layer, chunk.cells, chunk.start
            )
        return out_THD.flatten(1)


def plan_step(batch: Sequence[ScheduledRequest], page_size: int, max_position: int) -> AttentionPlan:
    """Rows follow the batch, request after request; sequences that compute one token are decoded together."""
    positions: list[NDArray[np.int64]] = []
    places: list[NDArray[np.int64]] = []
    decodes: list[tuple[int, NDArray[np.int64], int]] = []  # row, cells, tokens
    chunks: list[PrefillChunk] = []
    row = 0
    for request, start, num_new, _ in batch:
        num_tokens = start + num_new
        assert num_tokens <= max_position, (num_tokens, max_position)
        cells = page_cells(request.pages[: -(-num_tokens // page_size)])
        position = np.arange(start, num_tokens)
        positions.append(position)
        places.append(np.stack((cells[position // page_size, 1], position % page_size), axis=1))
        if num_new == 1:
            decodes.append((row, cells, num_tokens))
        else:
            chunks.append(PrefillChunk(begin=row, end=row + num_new, start=start, cells=cells))
        row += num_new
    return AttentionPlan(
        positions=np.concatenate(positions),
        places=np.concatenate(places),
        decode_rows=slice(None) if not chunks else torch.tensor([row for row, _, _ in decodes]),
        decode_table=_page_table(decodes) if decodes else None,
        chunks=tuple(chunks),
    )


def _page_table(decodes: list[tuple[int, NDArray[np.int64], int]]) -> PageTable:
    return PageTable(
        cells=np.concatenate([cells for _, cells, _ in decodes]),
        indptr=np.cumsum([0, *(len(cells) for _, cells, _ in decodes)]),
        num_tokens=np.array([num_tokens for _, _, num_tokens in decodes]),
    )
