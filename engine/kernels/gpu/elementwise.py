"""Fused norms, activation, and rotary embedding with the write to the cache.

Shape suffixes: T tokens, H hidden or heads, D head_dim, I inner.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpilot.engine.kernels.gpu.decode import ASM
from kvpilot.engine.kernels.torch_ops import RopeTables, cache_basis
from kvpilot.engine.kv.formats import PageShape

TOKENS_PER_PROGRAM = 16
FEW_TOKENS = 128  # too few to keep a GPU busy with programs of one warp


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * SIZE
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    x = tl.load(x_ptr + row + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(residual_ptr + row + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual_ptr + row + at, x.to(residual_ptr.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + at, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul_kernel(x_ptr, out_ptr, INNER: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < INNER
    gate = tl.load(x_ptr + row * (2 * INNER) + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * (2 * INNER) + INNER + at, mask=inside, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * INNER + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _dot_exact(x, signs, ASM: tl.constexpr):
    """x of fp32 times a matrix of -1 and 1, with x in two bf16 parts."""
    if not ASM:  # the interpreter multiplies the bits of bf16 as integers
        return tl.dot(x, signs.to(tl.float32))
    high = x.to(tl.bfloat16)
    low = (x - high.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(high, signs, tl.dot(low, signs))


@triton.jit(do_not_specialize=["layer", "num_tokens"])
def _rope_rotate_write_kernel(
    qkv_ptr, q_ptr, pool, positions_ptr, places_ptr, cos_ptr, sin_ptr, signs_ptr, layer, num_tokens,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, UNIT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid (heads of q, k and v, token blocks). `signs` is the Hadamard matrix of HEAD_DIM / 2 times its root;
    that of HEAD_DIM is [[signs, signs], [signs, -signs]] * UNIT."""
    head = tl.program_id(0)
    HALF: tl.constexpr = HEAD_DIM // 2
    tokens = tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    inside = tokens < num_tokens
    half = tl.arange(0, HALF)
    row = tokens.to(tl.int64) * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM) + head * HEAD_DIM
    source = qkv_ptr + row[:, None] + half[None, :]
    a = tl.load(source, mask=inside[:, None], other=0.0).to(tl.float32)
    b = tl.load(source + HALF, mask=inside[:, None], other=0.0).to(tl.float32)
    if head < NUM_HEADS + NUM_KV_HEADS:
        position = tl.load(positions_ptr + tokens, mask=inside, other=0)
        angle_at = position[:, None] * HALF + half[None, :]
        cos = tl.load(cos_ptr + angle_at)
        sin = tl.load(sin_ptr + angle_at)
        turned_a = a * cos - b * sin
        turned_b = b * cos + a * sin
        signs = tl.load(signs_ptr + half[:, None] * HALF + half[None, :])
        a = _dot_exact(turned_a + turned_b, signs, ASM) * UNIT
        b = _dot_exact(turned_a - turned_b, signs, ASM) * UNIT
    if head < NUM_HEADS:
        target = q_ptr + (tokens.to(tl.int64) * NUM_HEADS + head)[:, None] * HEAD_DIM + half[None, :]
    else:  # K's blocks of a layer come first, then V's, as the heads do
        payload = tl.load(places_ptr + tokens * 2, mask=inside, other=0)
        slot = tl.load(places_ptr + tokens * 2 + 1, mask=inside, other=0)
        block = layer * (2 * NUM_KV_HEADS) + head - NUM_HEADS
        value = (payload // 2) + (block * PAGE + slot) * HEAD_DIM
        target = pool.to(tl.pointer_type(tl.bfloat16)) + value[:, None] + half[None, :]
        inside = inside & (payload >= 0)
    tl.store(target, a.to(tl.bfloat16), mask=inside[:, None])
    tl.store(target + HALF, b.to(tl.bfloat16), mask=inside[:, None])


@triton.jit
def _take_tokens_kernel(tokens, sources, drawn, out, size, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < size
    source = tl.load(sources + at, mask=inside, other=-1)
    token = tl.load(tokens + at, mask=inside, other=0)
    earlier = tl.load(drawn + source, mask=source >= 0, other=0)
    tl.store(out + at, tl.where(source >= 0, earlier, token), mask=inside)


def take_tokens(tokens_B: Tensor, sources_B: Tensor, drawn: Tensor) -> Tensor:
    """`drawn[source]` where the source is not negative, else the token: int64 [B]."""
    out_B = torch.empty_like(tokens_B)
    size = len(tokens_B)
    _take_tokens_kernel[(1,)](tokens_B, sources_B, drawn, out_B, size, BLOCK=triton.next_power_of_2(size))
    return out_B


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight, in the dtype of `weight_H`; x contiguous."""
    return _norm(x_TH, None, weight_H, eps)


def add_rms_norm(x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Adds x to `residual_TH` in place and returns the norm of the sum, in the dtype of `weight_H`."""
    return _norm(x_TH, residual_TH, weight_H, eps)


def _norm(x_TH: Tensor, residual_TH: Tensor | None, weight_H: Tensor, eps: float) -> Tensor:
    out_TH = torch.empty_like(x_TH, dtype=weight_H.dtype)
    num_rows, size = x_TH.shape
    block = triton.next_power_of_2(size)
    _rms_norm_kernel[(num_rows,)](
        x_TH,
        x_TH if residual_TH is None else residual_TH,
        weight_H,
        out_TH,
        eps,
        SIZE=size,
        BLOCK=block,
        ADDS=residual_TH is not None,
        num_warps=min(8, max(1, block // 512)),
    )
    return out_TH


def silu_mul(gate_up_T2I: Tensor) -> Tensor:
    """silu(first half) * second half of the last dimension: [T, 2I] -> [T, I]."""
    num_rows, inner = gate_up_T2I.shape[0], gate_up_T2I.shape[1] // 2
    out_TI = gate_up_T2I.new_empty((num_rows, inner))
    block = min(2048, triton.next_power_of_2(inner))
    _silu_mul_kernel[(num_rows, triton.cdiv(inner, block))](gate_up_T2I, out_TI, INNER=inner, BLOCK=block)
    return out_TI


def basis_signs(head_dim: int, device: torch.device) -> Tensor:
    """The signs of the Hadamard matrix of half the size, bf16 [D / 2, D / 2], for `rope_rotate_write`."""
    basis = cache_basis(head_dim // 2)
    assert basis is not None, head_dim
    return basis.sign().to(device, torch.bfloat16)


def rope_rotate_write(
    qkv_TX: Tensor,
    positions_T: Tensor,
    places_T2: Tensor,
    rope: RopeTables,
    signs: Tensor,
    pool: Tensor,
    shape: PageShape,
    layer: int,
    num_heads: int,
) -> Tensor:
    """Rotary embedding of q and k, the cache's basis change, and K and V written to their open (bf16) pages.

    `qkv_TX` is bf16 [T, (num_heads + 2 * num_kv_heads) * D]; `places_T2` int64 holds per token the payload offset
    of its page (negative: K and V are not written) and its index within the page. Returns q [T, num_heads, D].
    """
    num_tokens = len(qkv_TX)
    q_THD = qkv_TX.new_empty((num_tokens, num_heads, shape.head_dim))
    num_blocks = triton.cdiv(num_tokens, TOKENS_PER_PROGRAM)
    _rope_rotate_write_kernel[(num_heads + 2 * shape.num_kv_heads, num_blocks)](
        qkv_TX,
        q_THD,
        pool,
        positions_T,
        places_T2,
        rope.cos,
        rope.sin,
        signs,
        layer,
        num_tokens,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=shape.num_kv_heads,
        PAGE=shape.page_size,
        HEAD_DIM=shape.head_dim,
        BLOCK_TOKENS=TOKENS_PER_PROGRAM,
        UNIT=shape.head_dim**-0.5,
        ASM=ASM,
        num_warps=4 if num_tokens <= FEW_TOKENS else 1,
    )
    return q_THD
