"""What a step needs to know on the GPU: put together on the host, uploaded without waiting.

Decoding sequences come first among the rows of a step, then the chunks of prompts.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvpilot.engine.cuda_attention import Chunks, StepPlan
from kvpilot.engine.kernels.gpu.decode import SPAN_COLUMNS, DecodeTable, max_items, plan_spans, target_items
from kvpilot.engine.kernels.gpu.layout import EXACT, INT4, KINDS
from kvpilot.engine.kernels.gpu.upload import upload
from kvpilot.engine.kv.cuda_storage import CudaStorage
from kvpilot.engine.request import Request, SamplingParams, ScheduledRequest
from kvpilot.engine.runners.page_tables import PageTables
from kvpilot.engine.sampling import MIN_TEMPERATURE, uniform

Integers = NDArray[np.int64]
ROW_WORDS = 7 + SPAN_COLUMNS // 2  # of 8 bytes, per sequence


class Launch(NamedTuple):
    """What a decode step's launches depend on; see DecodeTable. `variant` is 0 if all pages are exact, 1 with 8-bit
    ones, 2 with int4 ones; `merges` is false if no sequence's pages are shared out."""

    size: int
    variant: int
    merges: bool


class DecodeInputs:
    """The inputs of decode steps of up to `max_sequences` sequences, at fixed addresses: CUDA graphs read them."""

    def __init__(self, storage: CudaStorage, max_sequences: int, max_tokens: int) -> None:
        self._shape = storage.shape
        self.device, self.page_size = storage.device, storage.shape.page_size
        self.tables = PageTables(storage, max_sequences, max_tokens)
        kinds = [KINDS[codec] for codec in storage.ladder]
        eight_bits = {kind for kind in kinds if kind not in (EXACT, INT4)}
        exact = frozenset({EXACT})
        self.kinds = (
            exact,
            exact | eight_bits,
            exact | eight_bits | {INT4},
        )  # by the lowest precision present
        self.num_variants = 1 + max(0 if kind == EXACT else 2 if kind == INT4 else 1 for kind in kinds)
        self.max_items = max(max_items(max_sequences, self._shape, k) for k in self.kinds)
        header = max_sequences * ROW_WORDS + (self.max_items + 1) // 2
        words = header + 2 * self.tables.levels.size
        self._device_words = torch.zeros(words, dtype=torch.int64, device=self.device)
        self._on_gpu = self.device.type == "cuda"
        self._host_words = torch.zeros(words, dtype=torch.int64, pin_memory=self._on_gpu)
        self._copied = torch.cuda.Event() if self._on_gpu else None
        self._header = header
        r, device, host = max_sequences, self._device_words, self._host_words.numpy()
        self.tokens, self._tokens = device[:r], host[:r]
        self.positions, self._positions = device[r : 2 * r], host[r : 2 * r]
        self.places, self._places = device[2 * r : 4 * r].view(-1, 2), host[2 * r : 4 * r].reshape(-1, 2)
        self.sources, self._sources = device[4 * r : 5 * r], host[4 * r : 5 * r]
        self.choices = device[5 * r : 7 * r].view(torch.float32).view(-1, 4)
        self._choices = host[5 * r : 7 * r].view(np.float32).reshape(-1, 4)
        spans = slice(7 * r, ROW_WORDS * r)
        self._device_spans = device[spans].view(torch.int32).view(-1, SPAN_COLUMNS)
        self._spans = host[spans].view(np.int32).reshape(-1, SPAN_COLUMNS)
        self._device_items = device[spans.stop : header].view(torch.int32)
        self._items = host[spans.stop : header].view(np.int32)
        self._device_cells = device[header:].view(-1, 2)
        self._cells = host[header:].reshape(-1, 2)
        self.clear()

    def clear(self) -> None:
        """No sequence at all: what a graph is captured with."""
        self._write_rows(0, len(self._tokens))
        self._items[:] = -1
        self._upload(0)

    def launches(self, size: int) -> list[Launch]:
        """All that `set` may answer for this size. A batch so small that its pages are always shared out, or nearly
        so, has no launch without a merge."""
        kinds = self.kinds[: self.num_variants]
        spare = [2 * size >= target_items(self._shape, k) for k in kinds]
        merging = [Launch(size, variant, True) for variant in range(len(kinds))]
        return [*merging, *(Launch(size, variant, False) for variant in range(len(kinds)) if spare[variant])]

    def table(self, launch: Launch) -> DecodeTable:
        """The first `size` sequences, for launches that hold for all inputs of this kind."""
        size, variant, merges = launch
        kinds = self.kinds[variant]
        num_items = max_items(size, self._shape, kinds) if merges else size
        return DecodeTable(
            cells_N2=self._device_cells,
            spans_B8=self._device_spans[:size],
            items_I=self._device_items[:num_items],
            kinds=kinds,
            merges=merges,
        )

    def set(
        self,
        decodes: Sequence[ScheduledRequest],
        rows: list[int],
        size: int,
        sources: Sequence[int] | None = None,
    ) -> Launch:
        """Uploads these sequences, and empty ones up to `size`.

        With `sources` the tokens are not known yet: they are what the step before draws in these rows.
        """
        count, tables = len(decodes), self.tables
        if self._copied is not None:
            self._copied.synchronize()  # the upload before
        position = np.array([start for _, start, _, _ in decodes])
        if sources is None:
            self._tokens[:count] = [_tokens(request)[start] for request, start, _, _ in decodes]
            self._sources[:count] = -1
        else:
            self._sources[:count] = sources
        self._choices[:count] = choices(
            (request.sampling, start + 1 - request.num_prompt_tokens) for request, start, _, _ in decodes
        )
        self._positions[:count] = position
        pages, slots = np.divmod(position, self.page_size)
        self._places[:count, 0] = tables.cells[rows, pages, 0]
        self._places[:count, 1] = slots
        self._write_rows(count, size)
        counts = tables.counts[rows]
        variant = int(np.flatnonzero(counts.any(axis=0))[-1])
        spans, items = plan_spans(counts, position + 1, self._shape, self.kinds[variant])
        self._spans[:count] = spans
        self._items[: len(items)] = items
        self._items[len(items) :] = -1
        num_pages = [row_pages + 1 for row_pages in pages.tolist()]
        total = sum(num_pages)
        parts = [tables.sorted[row, :num] for row, num in zip(rows, num_pages, strict=True)]
        np.concatenate(parts, out=self._cells[:total])
        self._upload(total)
        launch = Launch(size, variant, len(items) > count)
        return launch if launch.merges or launch in self.launches(size) else launch._replace(merges=True)

    def _write_rows(self, begin: int, end: int) -> None:
        """Sequences that read nothing and whose K and V are not kept."""
        self._tokens[begin:end] = 0
        self._sources[begin:end] = -1
        self._choices[begin:end] = 0
        self._positions[begin:end] = 0
        self._places[begin:end] = -1
        self._spans[begin:end] = 0

    def _upload(self, num_pages: int) -> None:
        words = self._header + 2 * num_pages
        self._device_words[:words].copy_(self._host_words[:words], non_blocking=self._on_gpu)
        if self._copied is not None:
            self._copied.record()


def choices(rows: Iterable[tuple[SamplingParams | None, int]]) -> NDArray[np.float32]:
    """As `draw` takes them, of requests that have produced so many tokens."""
    nothing = (0.0, 0.0, 1.0, 0.0)
    return np.array(
        [
            (max(p.temperature, MIN_TEMPERATURE), p.top_k, p.top_p, uniform(p.seed, step))
            if p is not None and p.temperature > 0
            else nothing
            for p, step in rows
        ],
        dtype=np.float32,
    ).reshape(-1, 4)


def mixed_plan(
    decodes: Sequence[ScheduledRequest],
    chunks: Sequence[ScheduledRequest],
    inputs: DecodeInputs,
) -> tuple[torch.Tensor, StepPlan]:
    """Token ids and plan of a step that prefills."""
    tables, page_size = inputs.tables, inputs.page_size
    rows = tables.rows([*decodes, *chunks])
    table = None
    if decodes:
        table = inputs.table(inputs.set(decodes, rows[: len(decodes)], len(decodes)))
    chunk_rows = rows[len(decodes) :]
    tokens: list[int] = []
    for request, start, num_new, _ in (*decodes, *chunks):
        tokens += _tokens(request)[start : start + num_new]
    position = np.concatenate(
        [np.arange(start, start + num_new) for _, start, num_new, _ in (*decodes, *chunks)]
    )
    row = np.repeat(rows, [num_new for _, _, num_new, _ in (*decodes, *chunks)])
    pages, slots = np.divmod(position, page_size)
    new = [num_new for _, _, num_new, _ in chunks]
    context = [start + num_new for _, start, num_new, _ in chunks]
    starts_q, starts_k = np.cumsum([0, *new]), np.cumsum([0, *context])
    records = _page_records(tables, chunk_rows, context, starts_k, page_size)
    parts = [
        np.array(tokens),
        position,
        np.stack((tables.cells[row, pages, 0], slots), axis=1).ravel(),
        starts_q,
        starts_k,
        records.ravel(),
    ]
    words = _upload_all(parts, inputs.device)
    return words[0], StepPlan(
        positions_T=words[1],
        places_T2=words[2].view(-1, 2),
        num_decodes=len(decodes),
        table=table,
        chunks=Chunks(
            pages_N5=words[5].view(-1, 5),
            starts_q=words[3].int(),
            starts_k=words[4].int(),
            new=new,
            context=context,
        ),
    )


def empty_chunk(num_tokens: int, inputs: DecodeInputs) -> StepPlan:
    """A prompt whose K and V are not kept, and which attends to whatever the first page holds: to warm up."""
    begin = np.arange(0, num_tokens, inputs.page_size)
    columns = (0 * begin, 0 * begin, 0 * begin - 1, begin, np.minimum(inputs.page_size, num_tokens - begin))
    bounds = torch.tensor([0, num_tokens], dtype=torch.int32, device=inputs.device)
    return StepPlan(
        positions_T=torch.arange(num_tokens, device=inputs.device),
        places_T2=torch.full((num_tokens, 2), -1, device=inputs.device),
        num_decodes=0,
        table=None,
        chunks=Chunks(
            pages_N5=torch.from_numpy(np.stack(columns, axis=1)).to(inputs.device),
            starts_q=bounds,
            starts_k=bounds,
            new=[num_tokens],
            context=[num_tokens],
        ),
    )


def _upload_all(parts: list[Integers], device: torch.device) -> list[torch.Tensor]:
    """In one copy; each begins at a multiple of 16 bytes, because Triton compiles anew for other addresses."""
    sizes = [len(part) + len(part) % 2 for part in parts]
    words = np.zeros(sum(sizes), dtype=np.int64)
    for part, end, size in zip(parts, np.cumsum(sizes), sizes, strict=True):
        words[end - size : end - size + len(part)] = part
    uploaded = upload(torch.from_numpy(words), device).split(sizes)
    return [tensor[: len(part)] for tensor, part in zip(uploaded, parts, strict=True)]


def _page_records(
    tables: PageTables, rows: list[int], context: list[int], starts: Integers, page_size: int
) -> Integers:
    """As `gather_pages` takes them."""
    parts = []
    for row, num_tokens, start in zip(rows, context, starts.tolist(), strict=False):
        begin = np.arange(0, num_tokens, page_size)
        parts.append(
            np.column_stack(
                (
                    tables.levels[row, : len(begin)],
                    tables.cells[row, : len(begin)],
                    start + begin,
                    np.minimum(page_size, num_tokens - begin),
                )
            )
        )
    return np.concatenate(parts)


def _tokens(request: Request) -> list[int]:
    assert request.tokens is not None
    return request.tokens
