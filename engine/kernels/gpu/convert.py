"""Launches of the page conversions, of moves within the pool, and of the dense gather."""
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
from torch import Tensor

from kvpilot.engine.kernels.gpu.convert_kernel import (
    exact_to_byte,
    first_token_kernel,
    gather_kernel,
    move_kernel,
    to_int4,
)
from kvpilot.engine.kernels.gpu.decode import ASM
from kvpilot.engine.kernels.gpu.layout import FP8, INT4, KINDS
from kvpilot.engine.kv.formats import PageShape

MOVE_WORDS = 4096  # per program


def convert_pages(pool: Tensor, shape: PageShape, source: str, target: str, jobs_N4: Tensor) -> None:
    """Re-encodes pages all at once. `jobs_N4` int64 on the pool's device: payload and scales offsets of the
    source (scales -1: none), then of the target. No target may overlap a source of the same call."""
    grid = (shape.num_kv_heads, shape.num_layers, len(jobs_N4))
    sizes = {"NUM_KV_HEADS": shape.num_kv_heads, "PAGE": shape.page_size, "HEAD_DIM": shape.head_dim}
    if KINDS[target] == INT4:
        to_int4[grid](pool, jobs_N4, **sizes, KIND=KINDS[source], ASM=ASM, num_warps=1)
    else:
        exact_to_byte[grid](pool, jobs_N4, **sizes, IS_FP8=KINDS[target] == FP8, num_warps=4)


def move_cells(pool: Tensor, jobs_N3: Tensor, max_bytes: int) -> None:
    """Copies byte ranges, each (source, target, number of bytes): multiples of 4, none of more than `max_bytes`.

    All at once: no target may overlap a source of the same call.
    """
    grid = (triton.cdiv(max_bytes, 4 * MOVE_WORDS), len(jobs_N3))
    move_kernel[grid](pool, jobs_N3, WORDS=MOVE_WORDS, num_warps=4)


def copy_first_tokens(pool: Tensor, shape: PageShape, jobs_N2: Tensor) -> None:
    """K and V of the first token of exact pages into others, each (source, target)."""
    blocks = shape.num_layers * 2 * shape.num_kv_heads
    grid = (triton.cdiv(blocks, 16), len(jobs_N2))
    first_token_kernel[grid](
        pool, jobs_N2, BLOCKS=blocks, PAGE=shape.page_size, HEAD_DIM=shape.head_dim, num_warps=4
    )


def gather_pages(
    pool: Tensor, shape: PageShape, ladder: tuple[str, ...], layer: int, pages_N5: Tensor, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """K and V of pages of any precision as dense bf16: two tensors [num_tokens, num_kv_heads, head_dim].

    `pages_N5` int64 on the pool's device: level, payload, scales, the row of the page's first token in the result,
    and how many of its tokens are wanted.
    """
    size = (num_tokens, shape.num_kv_heads, shape.head_dim)
    k_SHD, v_SHD = (torch.empty(size, dtype=torch.bfloat16, device=pool.device) for _ in range(2))
    byte_levels = [level for level, codec in enumerate(ladder) if codec in ("int8", "fp8")]
    gather_kernel[(shape.num_kv_heads, len(pages_N5))](
        pool,
        pages_N5,
        k_SHD,
        v_SHD,
        layer,
        NUM_KV_HEADS=shape.num_kv_heads,
        PAGE=shape.page_size,
        HEAD_DIM=shape.head_dim,
        BYTE_LEVEL=byte_levels[0] if byte_levels else -1,
        IS_FP8="fp8" in ladder,
        num_warps=4,
    )
    return k_SHD, v_SHD
