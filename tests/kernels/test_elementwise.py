"""Norms and activation against float64."""

import pytest
import torch

DTYPES = [torch.float32, torch.bfloat16]


def assert_close(actual, expected, dtype):
    """Within rounding to `dtype`, and float32 arithmetic."""
    assert actual.dtype == dtype
    relative = 2**-8 if dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(actual.double(), expected, rtol=relative, atol=relative)


def norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize("tokens", [1, 3, 70])
@pytest.mark.parametrize("hidden", [8, 100, 576])
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(implementation, tokens, hidden, x_dtype, dtype):
    x, weight = torch.randn(tokens, hidden).to(x_dtype), torch.randn(hidden).to(dtype)
    out = implementation.rms_norm(x, weight, 1e-5)
    assert_close(out, norm(x.double(), weight.double(), 1e-5), dtype)


@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("hidden", [100, 576])
@pytest.mark.parametrize("residual_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_updates_the_residual(implementation, tokens, hidden, residual_dtype, dtype):
    x, weight = torch.randn(tokens, hidden).to(dtype), torch.randn(hidden).to(dtype)
    residual = torch.randn(tokens, hidden).to(residual_dtype)
    total = x.double() + residual.double()
    out = implementation.add_rms_norm(x, residual, weight, 1e-5)
    assert_close(residual, total, residual_dtype)
    assert_close(out, norm(residual.double(), weight.double(), 1e-5), dtype)


@pytest.mark.parametrize(("tokens", "inner"), [(1, 1536), (20, 1536), (3, 37)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(implementation, tokens, inner, dtype):
    gate_up = (torch.randn(tokens, 2 * inner) * 4).to(dtype)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -90.0])
    gate, up = gate_up.double().chunk(2, -1)
    expected = gate / (1 + torch.exp(-gate)) * up
    assert_close(implementation.silu_mul(gate_up), expected, dtype)


def test_nan_is_not_hidden(implementation):
    x = torch.ones(2, 64)
    x[0, 3] = torch.nan
    assert implementation.rms_norm(x, torch.ones(64), 1e-5)[0].isnan().all()
    assert implementation.silu_mul(x)[0, 3].isnan()


def test_inputs_that_are_not_contiguous(implementation):
    x = torch.randn(64, 6).T
    expected = norm(x.double(), torch.ones(64).double(), 1e-5)
    assert_close(implementation.rms_norm(x, torch.ones(64), 1e-5), expected, torch.float32)
