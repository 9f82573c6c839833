"""A matrix times one row, at memory speed: what cuBLAS does not reach with small matrices."""
# pyright: reportMissingImports=false, reportIndexIssue=false

import triton
import triton.language as tl
from torch import Tensor

ROWS, BLOCK = (
    2,
    2048,
)  # of the weight per program, and values of a row per step: the best of 13 pairs on an H200


@triton.jit
def _gemv_kernel(x_ptr, weight_ptr, out_ptr, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for begin in tl.static_range(0, SIZE, BLOCK):
        weight = tl.load(weight_ptr + rows.to(tl.int64)[:, None] * SIZE + begin + at[None, :])
        x = tl.load(x_ptr + begin + at)
        acc += weight.to(tl.float32) * x.to(tl.float32)[None, :]
    tl.store(out_ptr + rows, tl.sum(acc, 1).to(out_ptr.dtype.element_ty))


def can_gemv(x: Tensor, weight: Tensor) -> bool:
    """`gemv` covers these shapes."""
    rows, size = weight.shape
    return len(x) == 1 and x.is_contiguous() and size % BLOCK == 0 and rows % ROWS == 0


def gemv(x_1K: Tensor, weight_NK: Tensor, out_1N: Tensor | None = None) -> Tensor:
    """x W^T: [1, N], in the dtype of x; summed in float32."""
    rows, size = weight_NK.shape
    if out_1N is None:
        out_1N = x_1K.new_empty((1, rows))
    _gemv_kernel[(rows // ROWS,)](x_1K, weight_NK, out_1N, SIZE=size, ROWS=ROWS, BLOCK=BLOCK, num_warps=4)
    return out_1N
