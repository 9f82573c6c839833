"""The kernels as plain torch operations: used where no library was built, and as the reference in tests.

Shape suffixes: T tokens, H hidden or heads, D head_dim, B requests, S tokens of one sequence, N pages,
P page size. Every computation is in float32; results are rounded once, to the dtype named.
"""

from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvpilot.engine.kernels.page_table import PageTable
from kvpilot.engine.kv.codecs.rotation import hadamard
from kvpilot.engine.kv.storage import Conversion

if TYPE_CHECKING:
    from kvpilot.engine.kv.torch_storage import TorchStorage


class RopeTables(NamedTuple):
    """Cosines and sines of position * frequency, float32 [max_position, D / 2]."""

    cos: Tensor
    sin: Tensor


cache_basis = cache(hadamard)  # in which K and V of this head_dim are cached; None: as they are


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight, in the dtype of `weight_H`."""
    x = x_TH.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return (x * weight_H.float()).to(weight_H.dtype)


def add_rms_norm(x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Adds x to `residual_TH` in place and returns the norm of the sum, in the dtype of `weight_H`."""
    residual_TH.add_(x_TH)
    return rms_norm(residual_TH, weight_H, eps)


def silu_mul(gate_up_T2I: Tensor) -> Tensor:
    """silu(first half) * second half of the last dimension: [T, 2I] -> [T, I]."""
    gate, up = gate_up_T2I.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up_T2I.dtype)


def rope_rotate_write(
    qkv_TX: Tensor,
    positions: NDArray[np.int64],
    places: NDArray[np.int64],
    rope: RopeTables,
    storage: "TorchStorage",
    layer: int,
    num_heads: int,
) -> Tensor:
    """Rotary embedding of q and k, the cache's basis change, and K and V written to their open pages.

    `qkv_TX` is [T, (num_heads + 2 * num_kv_heads) * D]; `places` holds per token the payload offset of its
    page (level 0) and its index within the page. Returns q [T, num_heads, D] in the dtype of qkv.
    """
    shape = storage.shape
    num_kv_heads, head_dim = shape.num_kv_heads, shape.head_dim
    x_THD = qkv_TX.view(-1, num_heads + 2 * num_kv_heads, head_dim).float()
    qk, v = x_THD.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
    cos, sin = (table[torch.from_numpy(positions)][:, None] for table in (rope.cos, rope.sin))
    first, second = qk.chunk(2, dim=-1)
    qk = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    if (basis := cache_basis(head_dim)) is not None:
        qk = qk @ basis
    q, k = qk.split((num_heads, num_kv_heads), dim=1)

    dtype = storage.dtype
    pool = storage.pool[: storage.pool.numel() // 4 * 4].view(dtype)
    payloads, slots = torch.from_numpy(places).unbind(1)
    head_values = shape.page_size * head_dim
    first_head = payloads // dtype.itemsize + layer * 2 * num_kv_heads * head_values + slots * head_dim
    heads = torch.arange(2 * num_kv_heads) * head_values
    index = first_head[:, None, None] + heads[:, None] + torch.arange(head_dim)
    pool[index] = torch.cat((k, v), dim=1).to(dtype)
    return q.to(qkv_TX.dtype)


def gather_pages(
    storage: "TorchStorage", layer: int, cells: NDArray[np.int64], num_tokens: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """K and V of the first `num_tokens` tokens of these pages, dense: two tensors [num_kv_heads, S, D]."""
    shape = storage.shape
    size = (shape.num_kv_heads, num_tokens, shape.head_dim)
    k_HSD, v_HSD = torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype)
    for i, (level, payload, scales) in enumerate(cells.tolist()):
        begin = i * shape.page_size
        count = min(shape.page_size, num_tokens - begin)
        for dense, page in zip(
            (k_HSD, v_HSD), storage.read_layer(level, payload, scales, layer), strict=True
        ):
            dense[:, begin : begin + count] = page[:, :count]
    return k_HSD, v_HSD


def decode_attention(q_BHD: Tensor, storage: "TorchStorage", layer: int, table: PageTable) -> Tensor:
    """Attention of one query token per sequence over all its tokens: [B, num_heads, D], in the dtype of q."""
    out_BHD = torch.empty_like(q_BHD)
    for b, (begin, end) in enumerate(pairwise(table.indptr.tolist())):
        num_tokens = int(table.num_tokens[b])
        k_HSD, v_HSD = gather_pages(storage, layer, table.cells[begin:end], num_tokens, torch.float32)
        q_HGD = q_BHD[b].view(storage.shape.num_kv_heads, -1, storage.shape.head_dim).float()
        scores = q_HGD @ k_HSD.mT * storage.shape.head_dim**-0.5
        out_BHD[b] = (scores.softmax(-1) @ v_HSD).view_as(q_BHD[b])
    return out_BHD


def prefill_attention(
    q_THD: Tensor, storage: "TorchStorage", layer: int, cells: NDArray[np.int64], start: int
) -> Tensor:
    """Causal attention of tokens start .. start + T - 1 of one sequence over its pages, the chunk's own K and V
    included (as stored, so that the result does not depend on where chunks begin): [T, num_heads, D]."""
    k_HSD, v_HSD = gather_pages(storage, layer, cells, start + len(q_THD), q_THD.dtype)
    return dense_prefill(q_THD, k_HSD, v_HSD, start)


def dense_prefill(q_THD: Tensor, k_HSD: Tensor, v_HSD: Tensor, start: int) -> Tensor:
    """`prefill_attention` over dense K and V: the past without a mask, the chunk causal, merged."""
    q_HTD = q_THD.transpose(0, 1)
    out, lse = _flash(q_HTD, k_HSD[:, start:], v_HSD[:, start:], causal=True)
    if start > 0:
        past_out, past_lse = _flash(q_HTD, k_HSD[:, :start], v_HSD[:, :start], causal=False)
        past_share = torch.sigmoid(past_lse - lse)[..., None]  # of the softmax mass
        out = torch.lerp(out.float(), past_out.float(), past_share).to(q_THD.dtype)
    return out.transpose(0, 1)


def _flash(q_HTD: Tensor, k_HSD: Tensor, v_HSD: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Output [H, T, D] and natural log-sum-exp [H, T]; causal takes T == S."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_HTD[None], k_HSD[None], v_HSD[None], 0.0, causal
    )
    return out[0], lse[0]


def convert_page(storage: "TorchStorage", conversion: Conversion) -> None:
    """Re-encodes one page. NonFiniteError if the target's codec cannot hold it; the source is never touched,
    and what the target's cell holds after an error is undefined."""
    source, from_level, target, to_level = conversion
    k_LHPD, v_LHPD = storage.read_page(from_level, *source)
    storage.write_page(to_level, *target, k_LHPD, v_LHPD)
