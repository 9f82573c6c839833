"""Tokens drawn on the device, against the definition in float64."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: the GPU kernels cannot run")

VOCAB = 9001


def kept_weights(x_V: torch.Tensor, temperature: float, top_k: int, nucleus: int) -> torch.Tensor:
    """Weights of the tokens kept: the `top_k` heaviest, and of these the `nucleus` heaviest; 0 stands for all."""
    weights_V = (x_V.double() / temperature).softmax(-1)
    order = torch.argsort(x_V.double(), descending=True, stable=True)
    count = min(top_k or VOCAB, nucleus or VOCAB)
    return torch.zeros_like(weights_V).index_copy(0, order[:count], weights_V[order[:count]])


def share_of(x_V: torch.Tensor, temperature: float, top_k: int, nucleus: int) -> float:
    """A top_p that the last of `nucleus` tokens is half needed for."""
    sums = [
        kept_weights(x_V, temperature, top_k, count).sum() for count in (nucleus - 1, nucleus, top_k or VOCAB)
    ]
    return ((sums[0] + sums[1]) / 2 / sums[2]).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("temperature", [0.6, 1.4])
@pytest.mark.parametrize(
    ("top_k", "nucleus"), [(0, 0), (1, 0), (40, 0), (VOCAB, 0), (0, 30), (50, 20), (7, 7)]
)
def test_draws_are_where_the_uniform_number_says(device, dtype, temperature, top_k, nucleus):
    from kvpilot.engine.kernels.gpu.draw import draw

    generator = torch.Generator().manual_seed(top_k + nucleus)
    x = (3 * torch.randn(6, VOCAB, generator=generator)).bfloat16()  # many are equal
    choices, expected = [], []
    for row in x:
        kept = kept_weights(row, temperature, top_k, nucleus)
        share = kept / kept.sum()
        candidates = (share > 1e-3).nonzero().flatten()
        token = candidates[torch.randint(len(candidates), (), generator=generator)]
        uniform = share[:token].sum() + share[token] / 2
        top_p = share_of(row, temperature, top_k, nucleus) if nucleus > 1 else 1.0
        choices.append((temperature, top_k, top_p, uniform.item()))
        expected.append(token.item())
    drawn = torch.zeros(6, dtype=torch.int64, device=device)
    draw(x.to(device, dtype), torch.tensor(choices, device=device), drawn)
    assert drawn.tolist() == expected


def test_greedy_and_drawn_rows_stand_side_by_side_and_no_token_without_weight_is_drawn(device):
    from kvpilot.engine.kernels.gpu.draw import draw

    x = torch.full((4, VOCAB), -torch.inf)
    x[:, 8999] = 1.0
    x[:, 17] = 2.0
    choices = torch.tensor([(0, 0, 1, 0), (1, 0, 1, 0.9999999), (1, 0, 1, 0.0), (1e-6, 5, 0.5, 0.5)])
    drawn = torch.zeros(4, dtype=torch.int64, device=device)
    draw(x.to(device), choices.to(device), drawn)
    assert drawn.tolist() == [17, 8999, 17, 17]
