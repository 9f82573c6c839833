"""The GPU's page layout holds the CPU codecs' bytes; needs no GPU and no triton."""

import pytest
import torch

from kvpilot.engine.kernels.gpu.layout import from_gpu, to_gpu
from kvpilot.engine.kv.formats import PageShape, payload_bytes, scale_bytes


@pytest.mark.parametrize("codec", ["bf16", "int8", "fp8", "int4"])
@pytest.mark.parametrize("page_size", [32, 64])
def test_the_layout_is_a_rearrangement(codec, page_size):
    shape = PageShape(num_layers=2, num_kv_heads=3, head_dim=64, page_size=page_size)
    payload = torch.randint(256, (payload_bytes(codec, shape),), dtype=torch.uint8)
    scales = torch.randint(256, (scale_bytes(codec, shape),), dtype=torch.uint8)
    moved = to_gpu(codec, shape, payload, scales)
    assert codec == "bf16" or not torch.equal(moved[0], payload)
    back = from_gpu(codec, shape, *moved)
    assert torch.equal(back[0], payload)
    assert torch.equal(back[1], scales)
