"""Launches of the page conversions and of the dense gather."""
# pyright: reportIndexIssue=false

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvpilot.engine.kernels.gpu.convert_kernel import exact_to_byte, gather_kernel, to_int4
from kvpilot.engine.kernels.gpu.decode import ASM
from kvpilot.engine.kernels.gpu.layout import FP8, INT4, KINDS
from kvpilot.engine.kv.formats import PageShape


def convert_pages(pool: Tensor, shape: PageShape, source: str, target: str, jobs_N4: Tensor) -> None:
    """Re-encodes pages all at once. `jobs_N4` int64 on the pool's device: payload and scales offsets of the
    source (scales -1: none), then of the target. No target may overlap a source of the same call."""
    grid = (shape.num_kv_heads, shape.num_layers, len(jobs_N4))
    sizes = {"NUM_KV_HEADS": shape.num_kv_heads, "PAGE": shape.page_size, "HEAD_DIM": shape.head_dim}
    if KINDS[target] == INT4:
        to_int4[grid](pool, jobs_N4, **sizes, KIND=KINDS[source], ASM=ASM, num_warps=1)
    else:
        exact_to_byte[grid](pool, jobs_N4, **sizes, IS_FP8=KINDS[target] == FP8, num_warps=4)


def gather_pages(
    pool: Tensor,
    shape: PageShape,
    ladder: tuple[str, ...],
    layer: int,
    cells: Tensor | NDArray[np.int64],
    num_tokens: int,
) -> tuple[Tensor, Tensor]:
    """K and V of the first `num_tokens` tokens of these pages (level, payload, scales) as dense bf16: two tensors
    [num_kv_heads, num_tokens, head_dim]."""
    cells_N3 = torch.as_tensor(cells).to(pool.device)
    size = (shape.num_kv_heads, num_tokens, shape.head_dim)
    k_HSD, v_HSD = (torch.empty(size, dtype=torch.bfloat16, device=pool.device) for _ in range(2))
    byte_levels = [level for level, codec in enumerate(ladder) if codec in ("int8", "fp8")]
    gather_kernel[(shape.num_kv_heads, -(-num_tokens // shape.page_size))](
        pool,
        cells_N3,
        k_HSD,
        v_HSD,
        layer,
        num_tokens,
        NUM_KV_HEADS=shape.num_kv_heads,
        PAGE=shape.page_size,
        HEAD_DIM=shape.head_dim,
        BYTE_LEVEL=byte_levels[0] if byte_levels else -1,
        IS_FP8="fp8" in ladder,
        num_warps=4,
    )
    return k_HSD, v_HSD
