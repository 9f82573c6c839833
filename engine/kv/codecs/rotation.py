"""The orthonormal basis in which K, Q and V are cached: it spreads outlier channels before quantization."""

import torch


def hadamard(dim: int) -> torch.Tensor | None:
    """Sylvester's Hadamard matrix / sqrt(dim), float32 [dim, dim]: symmetric, and its own inverse.

    None if `dim` is not a power of two: such heads are cached as they are.
    """
    if dim < 1 or dim & (dim - 1):
        return None
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < dim:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / dim**0.5
