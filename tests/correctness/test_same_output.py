"""How a request is computed must not show in what it says."""

import pytest
import torch

from kvpilot.engine.config import Knobs

pytestmark = pytest.mark.model


def run(engine, goldens):
    return engine.generate([g.prompt for g in goldens], 32, [g.tokens for g in goldens])


@pytest.mark.parametrize("chunk", [13, 64])
def test_chunked_prefill(chunk, goldens, harness, baseline, mean_kl, same_output_limit):
    engine = harness(prefill_chunk=chunk)
    logits = torch.cat([run(engine, [golden])[1] for golden in goldens[-4:]])
    assert mean_kl(baseline[-4:], logits) <= same_output_limit


def test_cached_prefix(goldens, harness, baseline, mean_kl, same_output_limit):
    engine = harness()
    run(engine, goldens)
    _, logits, cached = run(engine, goldens)
    page_size = engine.engine.config.page_size
    assert cached == [(len(golden.prompt) - 1) // page_size * page_size for golden in goldens]
    assert mean_kl(baseline, logits) <= same_output_limit


def test_batch_of_16(goldens, harness, baseline, mean_kl, same_output_limit):
    many = [*goldens, *goldens[:4]]
    _, logits, _ = run(harness(prefill_chunk=128), many)
    assert mean_kl(torch.cat([baseline, baseline[:4]]), logits) <= same_output_limit
    # not trivially so: another prompt's distributions are far away
    assert mean_kl(baseline[:4], logits[4:8]) > 0.1


def test_batch_of_16_under_pressure(goldens, harness, baseline, mean_kl, same_output_limit):
    """A pool too small for all 16 preempts and recomputes: same output."""
    slot_bytes = harness().engine.pool.slots.slot_bytes
    engine = harness(pool_bytes=60 * slot_bytes, prefill_chunk=128)
    many = [*goldens, *goldens[:4]]
    _, logits, _ = run(engine, many)
    assert engine.engine.snapshot().value("preemptions") > 0
    assert mean_kl(torch.cat([baseline, baseline[:4]]), logits) <= same_output_limit


def test_a_request_at_full_precision_beside_one_that_is_compressed(
    goldens, llama, harness, mean_kl, same_output_limit
):
    """Greedy output under the coarsest `kv_level` is what it is under 0, where the request asks for it."""
    long, neighbour = goldens[-1].prompt[:96], goldens[-3].prompt[:96]
    slot_bytes = harness().engine.pool.slots.slot_bytes
    envelope = {"tail_tokens": 0, "page_size": 32}
    exact = harness(**envelope, knobs=Knobs(kv_level=0))
    [tokens], logits, _ = exact.generate([long], 64)

    def beside_the_neighbour(level: int | None) -> torch.Tensor:
        tight = harness(**envelope, knobs=Knobs(kv_level=2), pool_bytes=13 * slot_bytes)
        _, both, _ = tight.generate([long, neighbour], len(tokens), [tokens, tokens], [level, None])
        stats = tight.engine.snapshot()
        assert stats.total("pages_stepped_down") > 0
        assert stats.value("preemptions") == 0
        return both[0]

    limited, free = beside_the_neighbour(0), beside_the_neighbour(None)
    assert limited.argmax(-1).tolist() == tokens
    assert mean_kl(logits[0], limited) <= same_output_limit
    if llama.dtype == torch.float32:  # in bf16 another batch alone differs as much as int8 does
        assert mean_kl(logits[0], free) > 5 * mean_kl(logits[0], limited)
