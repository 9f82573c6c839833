"""Matrix products with weights packed once at load, in the layout that the CPU's GEMM wants."""

import torch
from torch import Tensor
from torch.nn import functional as F

PACKED_BATCH = 16  # rows that the layout is tuned for; it serves every other number as well


def can_pack(dtype: torch.dtype) -> bool:
    """oneDNN is there and the CPU computes in `dtype`."""
    if not torch.backends.mkldnn.is_available():
        return False
    ops = torch.ops.mkldnn
    if not hasattr(ops, "_reorder_linear_weight") or not hasattr(ops, "_linear_pointwise"):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and has_fast_bf16())


def has_fast_bf16() -> bool:
    """The CPU multiplies bf16 faster than float32 (AVX512-BF16 or AMX), not merely correctly."""
    mkldnn = torch.ops.mkldnn
    supported = hasattr(mkldnn, "_is_mkldnn_bf16_supported") and mkldnn._is_mkldnn_bf16_supported()
    return supported and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


class Linear:
    """y = x W^T + b, for x [N, in]. Holds the weight [out, in] packed where the CPU can, else plain."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._packed = weight.is_cpu and can_pack(weight.dtype)
        weight = weight.contiguous()
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_BATCH) if self._packed else weight
        )
        self._bias = bias

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Into `out`, in the dtype of x, if it is given."""
        if x.is_cuda and self._bias is None:
            return self._on_gpu(x, out)
        if self._packed:
            y = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        else:
            y = F.linear(x, self._weight, self._bias)
        return y if out is None else out.copy_(y)

    def _on_gpu(self, x: Tensor, out: Tensor | None) -> Tensor:
        from kvpilot.engine.kernels.gpu.gemv import can_gemv, gemv

        if can_gemv(x, self._weight):
            return gemv(x, self._weight, out)
        if out is None:
            return F.linear(x, self._weight)
        return torch.mm(x, self._weight.t(), out=out)
