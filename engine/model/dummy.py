"""Random weights in the shape of a model: benchmarks need no checkpoint."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvpilot.engine.model.checkpoint import tensor_shapes
from kvpilot.engine.model.config import ModelConfig

STANDARD_DEVIATION = 0.02


def random_weights(config: ModelConfig, device: torch.device, seed: int = 0) -> Callable[[str], Tensor]:
    """`get(canonical name)` draws a bf16 tensor on the device, norms are ones. In the order of the calls."""
    generator = torch.Generator(device).manual_seed(seed)
    shapes = tensor_shapes(config)

    def get(name: str) -> Tensor:
        shape = shapes[name]
        if name.endswith("norm"):
            return torch.ones(shape, dtype=torch.bfloat16, device=device)
        tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return tensor.normal_(std=STANDARD_DEVIATION, generator=generator)

    return get
