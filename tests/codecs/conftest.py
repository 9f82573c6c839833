"""Pages of keys and values that look like a model's."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvpilot.engine.kv.formats import PageShape


@pytest.fixture
def shape() -> PageShape:
    return PageShape(num_layers=2, num_kv_heads=3, head_dim=64, page_size=32)


@pytest.fixture
def random_page() -> Callable[[PageShape, int], tuple[Tensor, Tensor]]:
    """(shape, seed) -> K and V [L, H, P, D]; channels of K differ in mean and spread."""

    def make(shape: PageShape, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        size = (shape.num_layers, shape.num_kv_heads, shape.page_size, shape.head_dim)
        channels = (shape.num_layers, shape.num_kv_heads, 1, shape.head_dim)
        spread = torch.rand(channels, generator=generator) + 0.5
        k = torch.randn(size, generator=generator) * spread + torch.randn(channels, generator=generator)
        return k, torch.randn(size, generator=generator)

    return make
