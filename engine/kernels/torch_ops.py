"""The kernels as plain torch operations: used where no library was built, and as the reference in tests.

Shape suffixes: T tokens, H hidden or heads, D head_dim, B requests, S tokens of one sequence, N pages,
P page size. Every computation is in float32; results are rounded once, to the dtype named.
"""

import torch
from torch import Tensor


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
