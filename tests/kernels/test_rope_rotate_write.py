"""Rotary embedding, change of basis and the write to open pages, against float64."""

import numpy as np
import pytest
import torch

from kvpilot.engine.attention import rope_tables
from kvpilot.engine.kv.formats import PageShape, payload_bytes
from kvpilot.engine.kv.torch_storage import TorchStorage

LAYER = 1


def assert_close(actual, expected, rounded_to):
    rtol, atol = (2**-8, 1e-4) if rounded_to == torch.bfloat16 else (1e-5, 3e-5)
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("head_dim", [24, 64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", ["fp32", "bf16"])
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_q_k_and_v_of_every_token(implementation, rope_reference, head_dim, dtype, stored, num_tokens):
    shape = PageShape(num_layers=3, num_kv_heads=2, head_dim=head_dim, page_size=8)
    page_bytes = payload_bytes(stored, shape)
    storage = TorchStorage(shape, (stored,), 8 * page_bytes)
    storage.pool.fill_(0xA5)
    inverse_frequencies = [1e4 ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    rope = rope_tables(inverse_frequencies, 512)
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(num_tokens, (6 + 4) * head_dim, generator=generator).to(dtype)
    positions = np.random.default_rng(0).integers(0, 512, num_tokens)
    slots = np.random.default_rng(1).permutation(8 * 8)[:num_tokens]  # distinct places in eight pages
    places = np.stack((slots // 8 * page_bytes, slots % 8), axis=1)

    q_THD = implementation.rope_rotate_write(qkv, positions, places, rope, storage, LAYER, 6)

    q, k, v = rope_reference(qkv, positions, inverse_frequencies, 6, 2, head_dim)
    assert q_THD.dtype == dtype
    assert_close(q_THD, q, dtype)
    untouched = torch.ones(8, 3, 2, 2, 8, dtype=torch.bool)
    for t, slot in enumerate(slots.tolist()):
        for which, expected in enumerate((k[t], v[t])):
            k_or_v = storage.read_page(0, slot // 8 * page_bytes, -1)[which]
            assert_close(k_or_v[LAYER, :, slot % 8], expected, storage.dtype)
        untouched[slot // 8, LAYER, :, :, slot % 8] = False
    rows = storage.pool.view(8, 3, 2, 2, 8, -1)
    assert (rows[untouched] == 0xA5).all()
