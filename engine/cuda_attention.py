"""Attention of one step's tokens on a GPU, over pages of all precisions. Needs triton.

Shape suffixes: T tokens of the step, H heads, S tokens of all chunks' contexts, D head_dim, X the fused q, k, v.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kvpilot.engine.kernels import RopeTables
from kvpilot.engine.kernels.gpu.convert import gather_pages
from kvpilot.engine.kernels.gpu.decode import DecodeTable, Scratch, decode_attention
from kvpilot.engine.kernels.gpu.elementwise import basis_signs, rope_rotate_write
from kvpilot.engine.kernels.torch_ops import dense_prefill
from kvpilot.engine.kv.cuda_storage import CudaStorage


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """Sequences that compute several tokens: the last `new[i]` of `context[i]`, rows one after another."""

    new: list[int]
    context: list[int]
    starts_q: Tensor  # int32: of their rows among all chunks' rows, and the end
    starts_k: Tensor  # the same among all contexts
    pages_N5: Tensor  # see `gather_pages`


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Rows of a step: first `num_decodes` sequences that compute one token, then the chunks. Valid until a page is
    converted or moved."""

    positions_T: Tensor
    places_T2: Tensor
    num_decodes: int
    table: DecodeTable | None
    chunks: Chunks | None


class CudaAttention:
    """Writes K and V of a step into its pages and attends over all of them, in bf16.

    Sequences that compute one token go through the decode kernel, which reads codes; longer chunks attend to a
    dense copy of their pages. Bases as in `kvpilot.engine.attention.PagedAttention`.
    """

    def __init__(self, num_heads: int, storage: CudaStorage, rope: RopeTables, scratch: Scratch) -> None:
        """`scratch` must have room for the items of every step."""
        self._num_heads = num_heads
        self._storage = storage
        self._rope = RopeTables(rope.cos.to(storage.device), rope.sin.to(storage.device))
        self._signs = basis_signs(storage.shape.head_dim, storage.device)
        self._scratch = scratch

    def __call__(self, layer: int, qkv_TX: Tensor, plan: StepPlan) -> Tensor:
        """qkv bf16 [T, (Hq + 2 Hkv) * D] before RoPE -> attention output [T, Hq * D]."""
        storage = self._storage
        pool, shape = storage.pool, storage.shape
        q_THD = rope_rotate_write(
            qkv_TX,
            plan.positions_T,
            plan.places_T2,
            self._rope,
            self._signs,
            pool,
            shape,
            layer,
            self._num_heads,
        )
        if plan.chunks is None:
            assert plan.table is not None
            return decode_attention(q_THD, pool, shape, layer, plan.table, self._scratch).flatten(1)
        parts = []
        if plan.table is not None:
            q_BHD = q_THD[: plan.num_decodes]
            parts.append(decode_attention(q_BHD, pool, shape, layer, plan.table, self._scratch))
        parts.append(self._prefill(q_THD[plan.num_decodes :], layer, plan.chunks))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)

    def _prefill(self, q_THD: Tensor, layer: int, chunks: Chunks) -> Tensor:
        storage = self._storage
        k_SHD, v_SHD = gather_pages(
            storage.pool, storage.shape, storage.ladder, layer, chunks.pages_N5, sum(chunks.context)
        )
        if q_THD.device.type != "cuda":
            return _one_by_one(q_THD, k_SHD, v_SHD, chunks)
        # Aligns its mask so that the last query sees everything
        return torch.ops.aten._flash_attention_forward(
            q_THD,
            k_SHD,
            v_SHD,
            chunks.starts_q,
            chunks.starts_k,
            max(chunks.new),
            max(chunks.context),
            0.0,
            True,
            False,
        )[0]


def _one_by_one(q_THD: Tensor, k_SHD: Tensor, v_SHD: Tensor, chunks: Chunks) -> Tensor:
    """The same by operations of the CPU, where Triton's interpreter runs the kernels."""
    parts = []
    for new, context, q_end, k_end in zip(
        chunks.new, chunks.context, accumulate(chunks.new), accumulate(chunks.context), strict=True
    ):
        k_HSD, v_HSD = (x[k_end - context : k_end].transpose(0, 1) for x in (k_SHD, v_SHD))
        parts.append(dense_prefill(q_THD[q_end - new : q_end], k_HSD, v_HSD, context - new))
    return torch.cat(parts)
