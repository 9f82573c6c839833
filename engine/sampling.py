"""Draws the next token of every request in a batch.

Shape suffixes: N requests, V vocabulary, K candidates. A seeded request's draw depends on its own logits, seed
and step only, so it survives preemption and does not notice its neighbours.
"""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from kvpilot.engine.request import SampledToken, SamplingParams, TokenLogprobs

CANDIDATES = (256, 4096)  # most likely tokens looked at, and if those do not suffice, before all are sorted
MIN_TEMPERATURE = 1e-6  # a smaller one would round to 0 in float32, and is greedy anyway


@torch.inference_mode()
def sample(logits_NV: Tensor, params: Sequence[SamplingParams], steps: Sequence[int]) -> list[SampledToken]:
    """One token per row of float32 logits; `steps[i]` counts the tokens that request i has produced so far.

    top_k is applied first, then top_p to what it left. Log-probabilities are those of the untouched
    distribution: before temperature and filters.
    """
    tokens: list[int] = logits_NV.argmax(-1).tolist()
    drawn = [i for i, p in enumerate(params) if p.temperature > 0]
    if drawn:
        uniforms = [uniform(params[i].seed, steps[i]) for i in drawn]
        rows_NV = logits_NV if len(drawn) == len(params) else logits_NV[drawn]
        for i, token in zip(drawn, _draw(rows_NV, [params[i] for i in drawn], uniforms), strict=True):
            tokens[i] = token
    logprobs = token_logprobs(logits_NV, params, tokens)
    return [SampledToken(token, logprobs.get(i)) for i, token in enumerate(tokens)]


def uniform(seed: int | None, step: int) -> float:
    """In [0, 1): the same for the same seed and step, on every machine."""
    return random.random() if seed is None else random.Random(f"{seed}:{step}").random()


def _draw(logits_NV: Tensor, params: list[SamplingParams], uniforms: list[float]) -> list[int]:
    device = logits_NV.device
    temperature_N = torch.tensor([max(p.temperature, MIN_TEMPERATURE) for p in params], device=device)
    # Relative to the most likely token, so that no temperature overflows
    scaled_NV = (logits_NV - logits_NV.amax(-1, keepdim=True)) / temperature_N[:, None]
    weights_NV = scaled_NV.exp_()
    uniform_N = torch.tensor(uniforms, dtype=torch.float64, device=device)
    tokens = [-1] * len(params)
    filtered = [i for i, p in enumerate(params) if p.top_k or p.top_p < 1]
    plain = [i for i, p in enumerate(params) if not p.top_k and p.top_p == 1]
    if plain:
        picks = _pick(weights_NV[plain].double().cumsum(-1), uniform_N[plain])
        for i, pick in zip(plain, picks.tolist(), strict=True):
            tokens[i] = pick
    if filtered:
        chosen = _draw_filtered(weights_NV[filtered], [params[i] for i in filtered], uniform_N[filtered])
        for i, token in zip(filtered, chosen, strict=True):
            tokens[i] = token
    return tokens


def _draw_filtered(weights_NV: Tensor, params: list[SamplingParams], uniform_N: Tensor) -> list[int]:
    total_N, vocab = weights_NV.sum(-1, dtype=torch.float64), weights_NV.shape[-1]
    tokens_N = torch.empty(len(params), dtype=torch.int64, device=weights_NV.device)
    rows = list(range(len(params)))
    for count in (*CANDIDATES, vocab):
        top_NK, ids_NK = weights_NV[rows].topk(min(count, vocab))
        chosen = [params[i] for i in rows]
        tokens_N[rows], enough_N = _draw_sorted(top_NK, ids_NK, total_N[rows], vocab, chosen, uniform_N[rows])
        rows = [i for i, enough in zip(rows, enough_N.tolist(), strict=True) if not enough]
        if not rows:
            break
    return tokens_N.tolist()


def _draw_sorted(
    top_NK: Tensor,
    ids_NK: Tensor,
    total_N: Tensor,
    vocab: int,
    params: list[SamplingParams],
    uniform_N: Tensor,
) -> tuple[Tensor, Tensor]:
    """Draws from the K heaviest tokens, heaviest first; also whether they hold all that the filters keep."""
    num_candidates = top_NK.shape[-1]
    top_k_N = torch.tensor([min(p.top_k or vocab, vocab) for p in params], device=top_NK.device)
    top_p_N = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=top_NK.device)
    ranks_K = torch.arange(num_candidates, device=top_NK.device)
    kept_NK = top_NK.double() * (ranks_K < top_k_N[:, None])
    sums_NK = kept_NK.cumsum(-1)
    mass_N = torch.where(top_k_N <= num_candidates, sums_NK[:, -1], total_N)
    limit_N = top_p_N * mass_N
    enough_N = (top_k_N <= num_candidates) | ((top_k_N == vocab) & (sums_NK[:, -1] >= limit_N))
    # The nucleus ends with the token that reaches top_p: kept if what comes before falls short of it
    before_NK = sums_NK - kept_NK
    nucleus_NK = torch.where(before_NK < limit_N[:, None], kept_NK, 0.0).cumsum(-1)
    picks_N = _pick(nucleus_NK, uniform_N)
    return ids_NK.gather(-1, picks_N[:, None]).flatten(), enough_N


def _pick(sums_NK: Tensor, uniform_N: Tensor) -> Tensor:
    """The first position whose running sum exceeds `uniform` of the whole: never one of weight zero."""
    target_N1 = (uniform_N * sums_NK[:, -1])[:, None]
    return torch.searchsorted(sums_NK, target_N1, right=True).flatten()


def token_logprobs(
    logits_NV: Tensor, params: Sequence[SamplingParams], tokens: list[int]
) -> dict[int, TokenLogprobs]:
    """By row, for the requests that asked."""
    rows = [(i, p.logprobs) for i, p in enumerate(params) if p.logprobs is not None]
    if not rows:
        return {}
    logprobs_NV = logits_NV[[i for i, _ in rows]].log_softmax(-1)
    values_NK, ids_NK = logprobs_NV.topk(min(max(count for _, count in rows), logits_NV.shape[-1]))
    result = {}
    for row, (i, count) in enumerate(rows):
        top = list(zip(ids_NK[row, :count].tolist(), values_NK[row, :count].tolist(), strict=True))
        result[i] = TokenLogprobs(chosen=logprobs_NV[row, tokens[i]].item(), top=top)
    return result
