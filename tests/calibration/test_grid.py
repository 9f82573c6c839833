"""The grid reaches what it is meant to measure: on an engine without a model."""

import numpy as np
import pytest

from kvpilot.engine.kv.formats import PageShape
from kvpilot.engine.kv.storage import NoStorage
from kvpilot.engine.request import SampledToken
from kvpilot.env.calibration.grid import Grid, GridRun
from kvpilot.env.calibration.measured import MeasuredEngine

LADDER = ("bf16", "int8", "int4")
GRID = Grid(batches=(1, 2, 5), contexts=(16, 48), chunks=(3, 20), decode_steps=3, warm_up_steps=1)


class StubRunner:
    def execute(self, batch):
        return [SampledToken(7) if entry.samples else None for entry in batch]


class LateStorage:
    """Of a device that has no memory: counts who waits for it."""

    def __init__(self):
        self.num_waits = 0

    def convert(self, conversions):
        pass

    def move(self, moves):
        pass

    def settle(self):
        self.num_waits += 1


@pytest.fixture(scope="module")
def run():
    shape = PageShape(num_layers=2, num_kv_heads=1, head_dim=64, page_size=8)
    engine = MeasuredEngine(GRID.envelope(shape, LADDER, 32), shape, StubRunner(), NoStorage())
    shares: list[float] = []
    steps = list(GridRun(engine, GRID, 100, seed=0, progress=shares.append).steps())
    return engine, steps, shares


def test_every_batch_decodes_at_every_level(run):
    _, steps, _ = run
    decode = [step.features for step in steps if step.kind == "decode"]
    for level in range(3):
        batches = {f.decode_sequences for f in decode if np.argmax(f.kv_bytes) == level}
        assert batches >= {1, 2, 5}, level


def test_sequences_read_pages_of_their_own_at_the_chosen_context(run):
    engine, steps, _ = run
    page_bytes = engine.pool.page_bytes
    sizes = {
        (f.decode_sequences, f.kv_bytes[0] // page_bytes[0])
        for f in (step.features for step in steps if step.kind == "decode")
        if f.kv_bytes[1] == f.kv_bytes[2] == 0
    }
    assert sizes >= {(batch, batch * (context // 8 + 1)) for batch in (1, 2, 5) for context in (16, 48)}


def test_chunks_are_prefilled_alone_and_beside_decoding_sequences(run):
    _, steps, _ = run
    for kind in ("mixed", "prefill"):
        assert {step.features.prefill_tokens for step in steps if step.kind == kind} >= {3, 20}


def test_conversions_are_measured_apart(run):
    _, steps, _ = run
    converted = [step.features.converted for step in steps if step.kind == "convert"]
    assert all(not step.is_step for step in steps if step.kind == "convert")
    assert sum(c[1] for c in converted) > 20
    assert sum(c[2] for c in converted) > 20
    assert all(sum(step.features.converted) == 0 for step in steps if step.kind == "decode")


def test_prompts_are_measured_until_a_device_that_works_later_has_computed_them():
    shape, storage = PageShape(num_layers=2, num_kv_heads=1, head_dim=64, page_size=8), LateStorage()
    engine = MeasuredEngine(GRID.envelope(shape, LADDER, 32), shape, StubRunner(), storage)
    waits: dict[str, set[int]] = {}
    before = 0
    for step in GridRun(engine, GRID, 100, seed=0, progress=lambda share: None).steps():
        waits.setdefault(step.kind, set()).add(storage.num_waits - before)
        before = storage.num_waits
    assert min(waits["prefill"]) >= 2  # before: what is computed for others is not theirs
    assert min(waits["mixed"]) >= 1
    assert waits["convert"] == {1}
    assert 0 in waits["decode"]


def test_the_engine_is_idle_and_sound_at_the_end_and_progress_reaches_the_end(run):
    engine, _, shares = run
    engine.check_integrity()
    assert not engine.has_work()
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)
