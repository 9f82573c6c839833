"""Attention of one step's tokens on a GPU, over pages of all precisions. Needs triton.

Shape suffixes: T tokens of the step, H heads, S tokens of one sequence, D head_dim, X the fused q, k and v.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpilot.engine.attention import plan_step
from kvpilot.engine.kernels import RopeTables
from kvpilot.engine.kernels.gpu.convert import gather_pages
from kvpilot.engine.kernels.gpu.decode import DecodeTable, decode_attention, decode_table
from kvpilot.engine.kernels.gpu.elementwise import basis_signs, rope_rotate_write
from kvpilot.engine.kv.cuda_storage import CudaStorage
from kvpilot.engine.request import ScheduledRequest


@dataclass(frozen=True, kw_only=True)
class DeviceChunk:
    """Rows [begin, end) of the step are the last of `num_tokens` of one sequence; `cells_N3` are its pages."""

    begin: int
    end: int
    num_tokens: int
    cells_N3: Tensor


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """An AttentionPlan on the device; valid until a page is converted or moved."""

    positions_T: Tensor
    places_T2: Tensor
    decode_rows: slice | Tensor
    decode_table: DecodeTable | None
    chunks: tuple[DeviceChunk, ...]


class CudaAttention:
    """Writes K and V of a step into its pages and attends over all of them, in bf16.

    Sequences that compute one token go through the decode kernel, which reads codes; longer chunks attend to a
    dense copy of their pages. Bases as in `kvpilot.engine.attention.PagedAttention`.
    """

    def __init__(self, num_heads: int, storage: CudaStorage, rope: RopeTables) -> None:
        self._num_heads = num_heads
        self._storage = storage
        self._device = storage.pool.device
        self._rope = RopeTables(rope.cos.to(self._device), rope.sin.to(self._device))
        self._signs = basis_signs(storage.shape.head_dim, self._device)

    def plan(self, batch: Sequence[ScheduledRequest]) -> DevicePlan:
        """Rows follow the batch, request after request. Call it again when pages have changed."""
        storage, device = self._storage, self._device
        plan = plan_step(batch, storage.shape.page_size, len(self._rope.cos))
        table = plan.decode_table
        return DevicePlan(
            positions_T=torch.from_numpy(plan.positions).to(device),
            places_T2=torch.from_numpy(plan.places).to(device),
            decode_rows=plan.decode_rows
            if isinstance(plan.decode_rows, slice)
            else plan.decode_rows.to(device),
            decode_table=table and decode_table(table, storage.ladder, storage.shape, device),
            chunks=tuple(
                DeviceChunk(
                    begin=chunk.begin,
                    end=chunk.end,
                    num_tokens=chunk.num_tokens,
                    cells_N3=torch.from_numpy(chunk.cells).to(device),
                )
                for chunk in plan.chunks
            ),
        )

    def __call__(self, layer: int, qkv_TX: Tensor, plan: DevicePlan) -> Tensor:
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
        if plan.decode_table is not None and not plan.chunks:
            return decode_attention(q_THD, pool, shape, layer, plan.decode_table).flatten(1)
        out_THD = torch.empty_like(q_THD)
        if plan.decode_table is not None:
            q_BHD = q_THD[plan.decode_rows]
            out_THD[plan.decode_rows] = decode_attention(q_BHD, pool, shape, layer, plan.decode_table)
        for chunk in plan.chunks:
            k_HSD, v_HSD = gather_pages(pool, shape, storage.ladder, layer, chunk.cells_N3, chunk.num_tokens)
            out_THD[chunk.begin : chunk.end] = _causal(q_THD[chunk.begin : chunk.end], k_HSD, v_HSD)
        return out_THD.flatten(1)


def _causal(q_THD: Tensor, k_HSD: Tensor, v_HSD: Tensor) -> Tensor:
    """Attention of the last T of S tokens, each up to itself. The operator aligns its mask so; `F.sdpa` does not."""
    out = torch.ops.aten._scaled_dot_product_flash_attention(
        q_THD.transpose(0, 1)[None], k_HSD[None], v_HSD[None], 0.0, True
    )[0]
    return out[0].transpose(0, 1)
