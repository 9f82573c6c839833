"""Decode attention over a batch of paged, mixed-precision sequences: what the host prepares and launches.

Shape suffixes: B sequences, H query heads, D head_dim, N pages, I items (shares of a sequence's pages).
"""
# pyright: reportMissingImports=false, reportIndexIssue=false

import os
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvpilot.engine.kernels.gpu.decode_kernel import decode_kernel, merge_kernel
from kvpilot.engine.kernels.gpu.layout import EXACT, INT4, KINDS
from kvpilot.engine.kernels.page_table import PageTable
from kvpilot.engine.kv.formats import PageShape

ASM = os.environ.get("TRITON_INTERPRET") != "1"  # the interpreter runs no inline assembly
# One-warp programs that an H200 runs at once or nearly so, some by page size: exact pages take more memory; the int4
# loop is bound by what a warp can do
EXACT_PROGRAMS, BYTE_PROGRAMS, INT4_PROGRAMS = 512, {32: 1584, 64: 1024}, {32: 1536, 64: 1024}
INT4_REGISTERS = {32: 168, 64: None}  # at most, so that as many fit
MIN_PAGES_PER_ITEM = 2
# Where there are more sequences than run at once, those of the second round end alone. With int4 pages, whose programs
# read slowest, shorter items make up for that, unless they cost less than this
ITEMS_PER_SEQUENCE, LEAST_SHARE = 3, 72
# Of the software pipeline; the page table's load takes some
EXACT_STAGES, BYTE_STAGES, INT4_STAGES = 5, 3, 5
EXACT_STEP = 32  # tokens of exact pages that are read at a time
# In a mixed kernel as deep a pipeline of as large steps would leave too little shared memory for enough programs
MIXED_EXACT_STAGES, MIXED_EXACT_STEP = 3, 16
# Items and dims that a program of the merge takes at a time, and its warps: few sequences have many items each
FEW_SEQUENCES = 8
MERGE_FEW, MERGE_MANY = (256, 16, 4), (8, 128, 1)
LOG2_E = 1.4426950408889634
SPAN_COLUMNS = 8
PAGE_COST = (
    6,
    3,
    2,
)  # of an exact, an 8-bit and an int4 page, by the time that they take; see `_pages_before`


class Scratch(NamedTuple):
    """Room for the results of items: float32 [I, H, D] and log2-sum-exp2 [I, H]."""

    partial: Tensor
    lse: Tensor

    @classmethod
    def make(cls, num_items: int, num_heads: int, head_dim: int, device: torch.device) -> "Scratch":
        partial = torch.empty((num_items, num_heads, head_dim), dtype=torch.float32, device=device)
        return cls(partial, torch.empty((num_items, num_heads), dtype=torch.float32, device=device))


@dataclass(frozen=True, kw_only=True)
class DecodeTable:
    """Sequences on the device, each one's pages sorted by precision; see `decode_kernel` for the tensors.

    The launch depends on `kinds`, on the number of sequences and of items, and on `merges`, on nothing else: a graph
    holds for every content that they cover.
    """

    cells_N2: Tensor  # int64: offsets of codes in 16 bytes, of scales in 4
    spans_B8: Tensor  # int32
    items_I: Tensor  # int32
    kinds: frozenset[int]  # that may occur
    merges: bool  # some sequence may have more than one item


def max_items(num_sequences: int, shape: PageShape, kinds: frozenset[int]) -> int:
    """`plan_spans` makes no more than this: about as many as run at once, but some to share out the longest of many
    sequences."""
    target = target_items(shape, kinds)
    if _has_rounds(num_sequences, shape, kinds):
        return ITEMS_PER_SEQUENCE * num_sequences
    return max(target, num_sequences + target // 2)


def target_items(shape: PageShape, kinds: frozenset[int]) -> int:
    """That keep the GPU busy."""
    programs = (INT4_PROGRAMS if INT4 in kinds else BYTE_PROGRAMS)[shape.page_size]
    return -(-(EXACT_PROGRAMS if kinds == {EXACT} else programs) // shape.num_kv_heads)


def _has_rounds(num_sequences: int, shape: PageShape, kinds: frozenset[int]) -> bool:
    return INT4 in kinds and num_sequences > target_items(shape, kinds)


def plan_spans(
    counts_B3: NDArray[np.int64], num_tokens_B: NDArray[np.int64], shape: PageShape, kinds: frozenset[int]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Spans and items of sequences that have so many exact, 8-bit and int4 pages, one sequence after another.

    An item takes the same cost of each sequence or less: a few items beyond those that run at once would take as
    long as all the others.
    """
    pages_B = counts_B3.sum(1)
    cost_B = counts_B3 @ np.array(PAGE_COST)
    limit = max_items(len(pages_B), shape, kinds)
    most_B = np.maximum(pages_B // MIN_PAGES_PER_ITEM, 1)
    share = -(-int(cost_B.sum()) // limit)
    if _has_rounds(len(pages_B), shape, kinds):
        share = max(share, LEAST_SHARE)
    while (num_items_B := np.minimum(-(-cost_B // share), most_B)).sum() > limit:
        share += share // 16 + 1
    spans_B8 = np.zeros((len(pages_B), SPAN_COLUMNS), dtype=np.int32)
    spans_B8[1:, 0] = pages_B.cumsum()[:-1]
    spans_B8[:, 1:4] = spans_B8[:, :1] + counts_B3.cumsum(1)
    spans_B8[:, 4] = num_tokens_B - shape.page_size * counts_B3[:, 1:].sum(1)
    spans_B8[1:, 5] = num_items_B.cumsum()[:-1]
    spans_B8[:, 6] = num_items_B
    return spans_B8, np.repeat(np.arange(len(pages_B), dtype=np.int32), num_items_B)


def decode_table(
    table: PageTable, ladder: tuple[str, ...], shape: PageShape, device: torch.device
) -> DecodeTable:
    """Sorts and uploads. Pages after a sequence's last token must not be in the table."""
    rank = np.array([KINDS[codec] for codec in ladder])[table.cells[:, 0]]
    sequence = np.repeat(np.arange(len(table.num_tokens)), np.diff(table.indptr))
    order = np.lexsort((rank, sequence))  # stable: the open page stays the last exact one
    counts_B3 = np.zeros((len(table.num_tokens), 3), dtype=np.int64)
    np.add.at(counts_B3, (sequence, np.where(rank == EXACT, 0, np.where(rank == INT4, 2, 1))), 1)
    kinds = frozenset(np.unique(rank).tolist())
    spans_B8, items_I = plan_spans(counts_B3, table.num_tokens, shape, kinds)
    return DecodeTable(
        cells_N2=torch.from_numpy(table.cells[order, 1:] // (16, 4)).to(device),
        spans_B8=torch.from_numpy(spans_B8).to(device),
        items_I=torch.from_numpy(items_I).to(device),
        kinds=kinds,
        merges=len(items_I) > len(spans_B8),
    )


def decode_attention(
    q_BHD: Tensor,
    pool: Tensor,
    shape: PageShape,
    layer: int,
    table: DecodeTable,
    scratch: Scratch | None = None,
) -> Tensor:
    """Attention of one query token per sequence over all its tokens: [B, H, D], in the dtype of q (bf16).

    q must be contiguous and in the cache's basis; the output is in that basis. The output of a
    sequence without an item is zero.
    """
    num_sequences, num_heads, head_dim = q_BHD.shape
    num_items = len(table.items_I)
    out_BHD = torch.empty_like(q_BHD)
    if scratch is None:
        scratch = Scratch.make(num_items if table.merges else 1, num_heads, head_dim, q_BHD.device)
    byte_kind = max(table.kinds & {KINDS["int8"], KINDS["fp8"]}, default=0)
    decode_kernel[(shape.num_kv_heads, num_items)](
        q_BHD,
        pool,
        table.cells_N2,
        table.spans_B8,
        table.items_I,
        out_BHD,
        *scratch,
        layer,
        head_dim**-0.5 * LOG2_E,
        NUM_KV_HEADS=shape.num_kv_heads,
        GROUP=num_heads // shape.num_kv_heads,
        PAGE=shape.page_size,
        HEAD_DIM=head_dim,
        HAS_EXACT=EXACT in table.kinds,
        BYTE_KIND=byte_kind,
        HAS_INT4=INT4 in table.kinds,
        ASM=ASM,
        EXACT_COST=PAGE_COST[0],
        BYTE_COST=PAGE_COST[1],
        INT4_COST=PAGE_COST[2],
        EXACT_STEP=EXACT_STEP if table.kinds == {EXACT} else MIXED_EXACT_STEP,
        EXACT_STAGES=EXACT_STAGES if table.kinds == {EXACT} else MIXED_EXACT_STAGES,
        BYTE_STAGES=BYTE_STAGES,
        INT4_STAGES=INT4_STAGES,
        num_warps=1,
        maxnreg=INT4_REGISTERS[shape.page_size] if INT4 in table.kinds else None,
    )
    if table.merges:
        block, dims, num_warps = MERGE_FEW if num_sequences <= FEW_SEQUENCES else MERGE_MANY
        dims = min(dims, head_dim)
        merge_kernel[(num_heads, num_sequences, head_dim // dims)](
            *scratch,
            table.spans_B8,
            out_BHD,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            BLOCK=block,
            DIMS=dims,
            PDL=ASM,
            num_warps=num_warps,
            launch_pdl=ASM,
        )
    return out_BHD
