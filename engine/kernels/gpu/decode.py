"""Decode attention over a batch of paged, mixed-precision sequences: what the host prepares and launches.

Shape suffixes: B sequences, H query heads, D head_dim, N pages.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false

import os
from dataclasses import dataclass

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from kvpilot.engine.kernels.gpu.decode_kernel import decode_kernel, merge_kernel
from kvpilot.engine.kernels.gpu.layout import EXACT, INT4, KINDS
from kvpilot.engine.kernels.page_table import PageTable
from kvpilot.engine.kv.formats import PageShape

ASM = os.environ.get("TRITON_INTERPRET") != "1"  # the interpreter runs no inline assembly
# One-warp programs that keep an H200's memory busy: one wave, or of the exact kernel, which is larger, two
TARGET_PROGRAMS, EXACT_PROGRAMS = 1024, 1536
MIN_PAGES_PER_SPLIT = 8
# Of the software pipeline; the page table's load takes some. In a mixed kernel a deep one for the largest pages
# would leave too little shared memory for enough programs.
EXACT_STAGES, MIXED_EXACT_STAGES, BYTE_STAGES, INT4_STAGES = 5, 3, 3, 5
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, kw_only=True)
class DecodeTable:
    """A PageTable on the device, each sequence's pages sorted by precision; see `decode_kernel`."""

    cells_N2: Tensor  # int64: offsets of codes in 16 bytes, of scales in 4
    spans_B5: Tensor  # int32
    kinds: frozenset[int]  # that occur
    num_splits: int


def decode_table(
    table: PageTable, ladder: tuple[str, ...], shape: PageShape, device: torch.device
) -> DecodeTable:
    """Sorts and uploads. Pages after a sequence's last token must not be in the table."""
    rank = np.array([KINDS[codec] for codec in ladder])[table.cells[:, 0]]
    num_sequences = len(table.num_tokens)
    sequence = np.repeat(np.arange(num_sequences), np.diff(table.indptr))
    order = np.lexsort((rank, sequence))  # stable: the open page stays the last exact one
    spans = _spans(table, rank, sequence, shape.page_size)
    max_pages = int(np.diff(table.indptr).max())
    kinds = frozenset(np.unique(rank).tolist())
    cells = table.cells[order, 1:] // (16, 4)
    return DecodeTable(
        cells_N2=torch.from_numpy(cells).to(device, non_blocking=True),
        spans_B5=torch.from_numpy(spans).to(device, non_blocking=True),
        kinds=kinds,
        num_splits=_num_splits(num_sequences * shape.num_kv_heads, max_pages, kinds),
    )


def _spans(
    table: PageTable, rank: NDArray[np.int64], sequence: NDArray[np.int64], page_size: int
) -> NDArray[np.int32]:
    num_sequences = len(table.num_tokens)
    counts = np.zeros((num_sequences, 3), dtype=np.int64)  # exact, 8 bits, int4
    column = np.where(rank == EXACT, 0, np.where(rank == INT4, 2, 1))
    np.add.at(counts, (sequence, column), 1)
    ends = table.indptr[:-1, None] + counts.cumsum(1)
    exact_tokens = table.num_tokens - page_size * counts[:, 1:].sum(1)
    return np.column_stack((table.indptr[:-1], ends, exact_tokens)).astype(np.int32)


def _num_splits(num_programs: int, max_pages: int, kinds: frozenset[int]) -> int:
    target = EXACT_PROGRAMS if kinds == {EXACT} else TARGET_PROGRAMS
    wanted = -(-target // num_programs)
    return max(1, min(wanted, max_pages // MIN_PAGES_PER_SPLIT, 128))


def decode_attention(q_BHD: Tensor, pool: Tensor, shape: PageShape, layer: int, table: DecodeTable) -> Tensor:
    """Attention of one query token per sequence over all its tokens: [B, H, D], in the dtype of q (bf16).

    q must be contiguous and in the cache's basis; the output is in that basis.
    """
    num_sequences, num_heads, head_dim = q_BHD.shape
    splits = table.num_splits
    out_BHD = torch.empty_like(q_BHD)
    partial, lse = out_BHD, out_BHD
    if splits > 1:
        partial = q_BHD.new_empty((num_sequences, num_heads, splits, head_dim), dtype=torch.float32)
        lse = q_BHD.new_empty((num_sequences, num_heads, splits), dtype=torch.float32)
    byte_kind = max(table.kinds & {KINDS["int8"], KINDS["fp8"]}, default=0)
    decode_kernel[(shape.num_kv_heads, splits, num_sequences)](
        q_BHD,
        pool,
        table.cells_N2,
        table.spans_B5,
        partial,
        lse,
        layer,
        splits,
        head_dim**-0.5 * LOG2_E,
        NUM_KV_HEADS=shape.num_kv_heads,
        GROUP=num_heads // shape.num_kv_heads,
        PAGE=shape.page_size,
        HEAD_DIM=head_dim,
        HAS_EXACT=EXACT in table.kinds,
        BYTE_KIND=byte_kind,
        HAS_INT4=INT4 in table.kinds,
        ASM=ASM,
        EXACT_STAGES=EXACT_STAGES if table.kinds == {EXACT} else MIXED_EXACT_STAGES,
        BYTE_STAGES=BYTE_STAGES,
        INT4_STAGES=INT4_STAGES,
        PAIR=shape.page_size == 32,
        num_warps=1,
    )
    if splits > 1:
        merge_kernel[(num_sequences * num_heads,)](
            partial,
            lse,
            out_BHD,
            splits,
            MAX_SPLITS=triton.next_power_of_2(splits),
            HEAD_DIM=head_dim,
            num_warps=4 if splits > 16 else 1,
        )
    return out_BHD
