"""Filters against their definition by exhaustive sorting; seeds; log-probabilities."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot.engine.request import SamplingParams
from kvpilot.engine.sampling import CANDIDATES, sample


def logits_of(probabilities):
    return torch.tensor([probabilities]).log()


def draws(logits_1V, params, count):
    """Tokens of `count` requests over the same distribution, in one batch."""
    batch = logits_1V.expand(count, -1)
    return [s.token for s in sample(batch, [params] * count, range(count))]


def allowed(logits_V, params):
    """The tokens that the filters keep, from the definition."""
    probabilities, ids = (
        (logits_V.double() / params.temperature).softmax(-1).sort(descending=True, stable=True)
    )
    if params.top_k:
        probabilities, ids = probabilities[: params.top_k], ids[: params.top_k]
        probabilities = probabilities / probabilities.sum()
    before = probabilities.cumsum(-1) - probabilities
    return set(ids[before < params.top_p - 1e-9].tolist()), set(ids[before < params.top_p + 1e-9].tolist())


def test_greedy_takes_the_largest():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    assert [s.token for s in sample(logits, [SamplingParams()] * 2, [0, 0])] == [1, 0]


def test_greedy_and_drawn_rows_share_a_batch():
    logits = torch.full((3, 1000), -100.0)
    logits[torch.arange(3), torch.tensor([7, 8, 9])] = 0.0
    params = [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.5)]
    assert [s.token for s in sample(logits, params, [0, 0, 0])] == [7, 8, 9]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(temperature=1.0, seed=1), [0.5, 0.3, 0.15, 0.05]),
        (SamplingParams(temperature=0.5, seed=1), [0.25, 0.09, 0.0225, 0.0025]),
        (SamplingParams(temperature=1.0, top_k=2, seed=1), [0.5, 0.3, 0, 0]),
        (SamplingParams(temperature=1.0, top_p=0.8, seed=1), [0.5, 0.3, 0, 0]),
        (SamplingParams(temperature=1.0, top_p=0.81, seed=1), [0.5, 0.3, 0.15, 0]),
        (SamplingParams(temperature=1.0, top_k=3, top_p=0.6, seed=1), [0.5, 0.3, 0, 0]),
        (SamplingParams(temperature=1.0, top_p=0.01, seed=1), [0.5, 0, 0, 0]),
    ],
)
def test_draws_follow_the_filtered_distribution(params, expected):
    count = 4000
    counts = Counter(draws(logits_of([0.5, 0.3, 0.15, 0.05]), params, count))
    for token, weight in enumerate(expected):
        p = weight / sum(expected)
        assert abs(counts[token] - count * p) <= 5 * math.sqrt(count * p * (1 - p))


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 2**32),
    st.floats(0.01, 20.0),
    st.sampled_from([0, 1, 5, CANDIDATES[0], CANDIDATES[0] + 1, CANDIDATES[1] + 1, 10**6]),
    st.sampled_from([1.0, 0.999, 0.9, 0.3]),
    st.floats(0.3, 2.0),
)
def test_only_kept_tokens_are_drawn(seed, spread, top_k, top_p, temperature):
    """Peaked and flat distributions, so that few candidates, many and the full sort are used."""
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(seed)) * spread
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    _, most = allowed(logits[0], params)
    assert set(draws(logits, params, 50)) <= most


def test_flat_nucleus_beyond_the_candidates_is_reached():
    logits = -1e-5 * torch.arange(20_000).flip(0)
    params = SamplingParams(temperature=1.0, top_p=0.5, seed=3)
    tokens = set(draws(logits[None], params, 300))
    least, most = allowed(logits, params)
    assert len(least) > 2 * CANDIDATES[1]
    assert tokens <= most
    beyond = set(logits.topk(len(least)).indices[CANDIDATES[1] :].tolist())
    assert len(tokens & beyond) > 100


def test_seeded_draw_does_not_notice_its_neighbours():
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(0))
    mine = SamplingParams(temperature=1.0, top_p=0.9, seed=42)
    others = [
        SamplingParams(),
        SamplingParams(temperature=2.0, top_k=700),
        SamplingParams(temperature=0.7),
        mine,
    ]
    alone = [sample(logits[:1], [mine], [step])[0].token for step in range(20)]
    together = [sample(logits[[1, 2, 3, 0]], others, [9, 9, 9, step])[3].token for step in range(20)]
    assert alone == together
    assert len(set(alone)) > 5


def test_different_seeds_differ_and_no_seed_is_random():
    logits = torch.zeros(1, 5000)
    tokens = {
        sample(logits, [SamplingParams(temperature=1.0, seed=s)], [0])[0].token for s in (1, 2, 3, -1, 2**70)
    }
    assert len(tokens) == 5
    assert len(set(draws(logits, SamplingParams(temperature=1.0), 50))) > 40


@pytest.mark.parametrize("temperature", [1e-300, 1e-8, 1e-3])
def test_tiny_temperature_is_greedy(temperature):
    logits = torch.tensor([[1.0, 1.5, 30.0]])
    assert draws(logits, SamplingParams(temperature=temperature), 5) == [2] * 5


def test_masked_tokens_are_never_drawn():
    logits = torch.full((1, 300), -math.inf)
    logits[0, 100:110] = 0.0
    for params in (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.999, top_k=299)):
        assert set(draws(logits, params, 200)) <= set(range(100, 110))


def test_logprobs_are_those_of_the_untouched_distribution():
    logits = logits_of([0.5, 0.3, 0.15, 0.05]) + 7
    params = [
        SamplingParams(temperature=1.0, top_k=1, logprobs=2),
        SamplingParams(logprobs=0),
        SamplingParams(),
    ]
    first, second, third = [s.logprobs for s in sample(logits.expand(3, -1), params, [0, 0, 0])]
    assert first is not None
    assert second is not None
    assert first.chosen == pytest.approx(math.log(0.5), abs=1e-5)
    assert [token for token, _ in first.top] == [0, 1]
    assert [value for _, value in first.top] == pytest.approx([math.log(0.5), math.log(0.3)], abs=1e-5)
    assert second.top == []
    assert second.chosen == pytest.approx(math.log(0.5), abs=1e-5)
    assert third is None
