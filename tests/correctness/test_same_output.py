"""How a request is computed must not show in what it says."""

import pytest
import torch

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
