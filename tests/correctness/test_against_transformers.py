"""The engine's greedy text and distributions against HF transformers in float32 (golden.npz by make_golden.py)."""

import pytest
import torch

pytestmark = pytest.mark.model

TOP = 5
LARGEST_GAP = 0.25  # nats
LARGEST_MEAN_KL = 2e-3  # bf16 transformers itself: 9.4e-4


def coarse_kl(golden, logits_NV):
    """KL over the reference's most likely tokens and the rest taken as one: a lower bound of the full KL."""
    p, q = golden.top_logprobs_NK.double(), logits_NV.double().log_softmax(-1).gather(1, golden.top_ids_NK)
    rest_p, rest_q = ((1 - x.exp().sum(-1)).clamp_min(1e-12) for x in (p, q))
    return (p.exp() * (p - q)).sum(-1) + rest_p * (rest_p.log() - rest_q.log())


def test_distributions_along_the_reference(goldens, baseline, llama):
    kl = torch.stack([coarse_kl(g, logits) for g, logits in zip(goldens, baseline, strict=True)])
    assert kl.mean() <= (LARGEST_MEAN_KL if llama.dtype == torch.bfloat16 else 1e-5)


def test_greedy_texts_part_only_where_the_reference_wavers(goldens, harness):
    outputs, logits, _ = harness().generate([g.prompt for g in goldens], 32)
    for golden, tokens, logits_NV in zip(goldens, outputs, logits, strict=True):
        parting = next((i for i in range(32) if tokens[i] != golden.tokens[i]), None)
        if parting is None:
            continue
        ours, theirs = tokens[parting], golden.tokens[parting]
        top = golden.top_ids_NK[parting].tolist()
        logp = logits_NV[parting].log_softmax(-1)
        where = f"{golden.name}, token {parting}: {ours} for {theirs}"
        assert ours in top[:TOP], where
        assert theirs in logp.topk(TOP).indices.tolist(), where
        their_gap = golden.top_logprobs_NK[parting][0] - golden.top_logprobs_NK[parting][top.index(ours)]
        our_gap = logp[ours] - logp[theirs]
        assert max(their_gap, our_gap) <= LARGEST_GAP, where
