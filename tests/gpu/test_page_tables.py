"""The runner's page tables and uploads against the pages themselves, under a real scheduler."""

import numpy as np
import pytest
import torch

from kvpilot.engine.config import EngineConfig, Knobs
from kvpilot.engine.engine import Engine
from kvpilot.engine.kernels import page_cells
from kvpilot.engine.kv.formats import PageShape
from kvpilot.engine.request import SampledToken, SamplingParams, ScheduledRequest

pytest.importorskip("triton", reason="triton is not installed: the GPU kernels cannot run")

pytestmark = pytest.mark.filterwarnings(  # the interpreter's; nothing is computed, so pages hold any bytes
    "ignore:Conversion of an array with ndim > 0",
    "ignore:overflow encountered",
    "ignore:invalid value encountered",
    "ignore:All-NaN",
)

SHAPE = PageShape(num_layers=1, num_kv_heads=1, head_dim=64)
SLOT = SHAPE.num_values * 2
LADDER = ("bf16", "int8", "int4")


class CheckingRunner:
    """Computes nothing; prepares every step as the GPU runner does and compares with the pages."""

    def __init__(self, storage, max_requests: int) -> None:
        from kvpilot.engine.runners.step_plan import DecodeInputs

        self._storage = storage
        self.inputs = DecodeInputs(storage, max_requests, 1024)
        self.num_quantized = 0

    def execute(self, batch: list[ScheduledRequest]) -> list[SampledToken | None]:
        rows = self.inputs.tables.rows(batch)
        for entry, row in zip(batch, rows, strict=True):
            self._check_row(entry, row)
        decodes = [(entry, row) for entry, row in zip(batch, rows, strict=True) if entry.num_new == 1]
        if decodes:
            self._check_upload([entry for entry, _ in decodes], [row for _, row in decodes])
        self._storage.flush()
        return [SampledToken(7) if entry.samples else None for entry in batch]

    def _check_row(self, entry: ScheduledRequest, row: int) -> None:
        cells = page_cells(entry.request.pages[: -(-(entry.start + entry.num_new) // SHAPE.page_size)])
        tables, num = self.inputs.tables, len(cells)
        assert tables.levels[row, :num].tolist() == cells[:, 0].tolist()
        assert tables.cells[row, :num].tolist() == cells[:, 1:].tolist()
        order = cells[:, 0].argsort(kind="stable")
        assert tables.sorted[row, :num].tolist() == (cells[order, 1:] // (16, 4)).tolist()
        assert tables.counts[row].tolist() == [(cells[:, 0] == level).sum() for level in range(3)]
        self.num_quantized += int((cells[:, 0] > 0).sum())

    def _check_upload(self, decodes: list[ScheduledRequest], rows: list[int]) -> None:
        inputs = self.inputs
        size = len(decodes) + 1
        launch = inputs.set(decodes, rows, size)
        assert launch in inputs.launches(size)
        table = inputs.table(launch)
        spans, items = table.spans_B8.tolist(), table.items_I.tolist()
        for b, (entry, row) in enumerate(zip(decodes, rows, strict=True)):
            first, exact_end, byte_end, int4_end, exact_tokens, first_item, num_items, _ = spans[b]
            exact, byte, int4 = inputs.tables.counts[row].tolist()
            assert (exact_end - first, byte_end - exact_end, int4_end - byte_end) == (exact, byte, int4)
            assert exact_tokens + SHAPE.page_size * (byte + int4) == entry.start + 1
            assert 0 < exact_tokens <= exact * SHAPE.page_size
            assert items[first_item : first_item + num_items] == [b] * num_items
            assert (
                table.cells_N2[first:int4_end].tolist()
                == inputs.tables.sorted[row, : int4_end - first].tolist()
            )
            page, slot = divmod(entry.start, SHAPE.page_size)
            assert inputs.places[b].tolist() == [entry.request.pages[page].payload, slot]
        assert sum(item >= 0 for item in items) == sum(span[6] for span in spans)
        assert spans[-1] == [0] * 8
        assert inputs.places[size - 1].tolist() == [-1, -1]


@pytest.mark.parametrize(("pool_slots", "kv_level"), [(14, 2), (14, 0), (300, 2)])
def test_tables_follow_pages_that_are_stepped_down_moved_and_preempted(device, pool_slots, kv_level):
    from kvpilot.engine.kv.cuda_storage import CudaStorage

    knobs = Knobs(max_batch=4, kv_level=kv_level, ttl_seconds=60, size_factor=0.5)
    config = EngineConfig(
        pool_bytes=pool_slots * SLOT, prefill_chunk=96, max_batch_ceiling=6, knobs=knobs, tail_tokens=32
    )
    storage = CudaStorage(SHAPE, LADDER, config.pool_bytes, 1, device)
    storage.pool.zero_()
    runner = CheckingRunner(storage, config.max_batch_ceiling)
    engine = Engine(config, SHAPE, runner, storage, model_max_len=1024)
    rng = np.random.default_rng(0)
    shared = rng.integers(100, size=100).tolist()
    for i in range(14):
        tail = rng.integers(100, size=int(rng.integers(1, 150))).tolist()
        sampling = SamplingParams(max_tokens=int(rng.integers(1, 140)), ignore_eos=True)
        engine.add_request(str(i), shared * (i % 2) + tail, sampling)
    while engine.has_work():
        engine.step()
        engine.check_integrity()
    values = engine.snapshot().values
    assert values["requests_finished", ("length",)] == 14
    if (pool_slots, kv_level) == (14, 2):
        assert values["pages_moved", ()] > 0
        assert runner.num_quantized > 0
    if kv_level == 0:
        assert values["preemptions", ()] > 0


def test_a_row_is_taken_from_a_request_that_is_gone(device):
    from kvpilot.engine.kv.cuda_storage import CudaStorage
    from kvpilot.engine.runners.step_plan import DecodeInputs

    storage = CudaStorage(SHAPE, LADDER, 64 * SLOT, 1, device)
    engine = Engine(
        EngineConfig(pool_bytes=64 * SLOT, knobs=Knobs(max_batch=2)),
        SHAPE,
        CheckingRunner(storage, 2),
        storage,
        model_max_len=1024,
    )
    tables = DecodeInputs(storage, 2, 1024).tables
    for i in range(5):
        engine.add_request(str(i), [1] * 40, SamplingParams(max_tokens=1))
        batch = engine.scheduler.schedule(0.0)
        row = tables.rows(batch)[0]
        assert tables.cells[row, :2, 0].tolist() == [page.payload for page in batch[0].request.pages]
        engine.abort(str(i))


def test_spans_share_the_work_and_never_exceed_the_room():
    from kvpilot.engine.kernels.gpu.decode import max_items, plan_spans

    rng = np.random.default_rng(0)
    for kinds in (frozenset({0}), frozenset({0, 1, 3})):
        for batch in (1, 3, 64, 300):
            counts = rng.integers(0, 200, (batch, 3))
            counts[:, 0] += 1
            spans, items = plan_spans(counts, counts.sum(1) * 32, SHAPE, kinds)
            assert len(items) == spans[:, 6].sum() <= max_items(batch, SHAPE, kinds)
            assert (spans[:, 6] >= 1).all()
            assert (items == np.repeat(np.arange(batch), spans[:, 6])).all()
    spans, _ = plan_spans(
        np.array([[4000, 0, 0], [10, 0, 0]]), np.array([128000, 320]), SHAPE, frozenset({0})
    )
    assert spans[0, 6] > 100 * spans[1, 6]


def test_of_more_sequences_than_run_at_once_long_ones_are_shared_out_and_short_ones_are_not():
    from kvpilot.engine.kernels.gpu.decode import max_items, plan_spans

    shape, kinds = PageShape(num_layers=1, num_kv_heads=8, head_dim=128), frozenset({0, 1, 3})
    for pages, parts in (((2, 2, 4), 1), ((8, 8, 16), 2), ((64, 64, 128), 3)):
        counts = np.tile(np.array(pages), (256, 1))
        spans, items = plan_spans(counts, counts.sum(1) * 32, shape, kinds)
        assert (spans[:, 6] == parts).all()
        assert len(items) <= max_items(256, shape, kinds)


def test_upload_is_a_copy(device):
    from kvpilot.engine.kernels.gpu.upload import upload

    array = torch.arange(5)
    copy = upload(array, device)
    array += 1
    assert copy.tolist() == [0, 1, 2, 3, 4]
