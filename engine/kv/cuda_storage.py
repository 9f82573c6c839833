"""The pool's bytes in GPU memory, pages in the layout of `kvpilot.engine.kernels.gpu.layout`. Needs triton."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kvpilot.engine.errors import ConfigError
from kvpilot.engine.kernels.gpu.convert import convert_pages, copy_first_tokens, move_cells
from kvpilot.engine.kernels.gpu.layout import check_supported
from kvpilot.engine.kernels.gpu.upload import upload
from kvpilot.engine.kv.formats import PageShape, payload_bytes, scale_bytes
from kvpilot.engine.kv.storage import Cell, Conversion, Move

Levels = tuple[int, int]  # of a conversion: from, to
MOVES: Levels = (-1, -1)
Range = tuple[int, int]  # byte offset, number of bytes; within one slot


class CudaStorage:
    """Implements PageStorage over a uint8 tensor of `pool_bytes` bytes, and behind them `num_spares` open pages
    that the bookkeeping does not know; `num_heads` are the query heads.

    The bookkeeping asks for one page at a time. What it asks for is noted, and done in few launches on the
    current stream when somebody reads `pool`: nothing waits for the GPU. A page that holds NaN or infinite values
    is never refused: it keeps them at every precision.
    """

    def __init__(
        self,
        shape: PageShape,
        ladder: Sequence[str],
        pool_bytes: int,
        num_heads: int,
        device: torch.device,
        num_spares: int = 0,
    ) -> None:
        self.shape = shape
        self.ladder = tuple(ladder)
        check_supported(shape, self.ladder, num_heads)
        self._slot_bytes = payload_bytes(self.ladder[0], shape)
        self._sizes = [(payload_bytes(codec, shape), scale_bytes(codec, shape)) for codec in self.ladder]
        if pool_bytes < self._slot_bytes:
            raise ConfigError(
                f"pool_bytes={pool_bytes} is invalid: expected at least one {self.ladder[0]} page of "
                f"{self._slot_bytes} bytes"
            )
        try:
            size = pool_bytes + (num_spares + 1) * self._slot_bytes * (num_spares > 0)
            self._pool: Tensor = torch.empty(size, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            free = torch.cuda.mem_get_info(device)[0]
            raise ConfigError(
                f"pool_bytes={pool_bytes} is invalid: {free} bytes are free on {device}, leave some for activations"
            ) from error
        self.device = self._pool.device
        first = -(-pool_bytes // self._slot_bytes) * self._slot_bytes
        self.spares = [first + i * self._slot_bytes for i in range(num_spares)]
        self._jobs: dict[Levels, list[tuple[int, ...]]] = {}  # noted, and independent of each other
        self._read, self._written = _Ranges(self._slot_bytes), _Ranges(self._slot_bytes)
        self._left: list[int] = []

    @property
    def pool(self) -> Tensor:
        """The bytes, after everything asked for so far."""
        self.flush()
        return self._pool

    def convert(self, conversions: list[Conversion]) -> None:
        for source, from_level, target, to_level in conversions:
            sources, targets = self._cells(source, from_level), self._cells(target, to_level)
            self._note((from_level, to_level), sources, targets, (*source, *target))

    def move(self, moves: list[Move]) -> None:
        for move in moves:
            sources, targets = [(move.source, move.num_bytes)], [(move.target, move.num_bytes)]
            self._note(MOVES, sources, targets, move)

    def warm_up(self) -> None:
        """Compiles what a step may launch, on memory of its own."""
        memory = torch.zeros(4 * self._slot_bytes, dtype=torch.uint8, device=self.device)
        job = (0, self._slot_bytes, 2 * self._slot_bytes, 3 * self._slot_bytes)
        jobs_14 = upload(torch.tensor([job]), self.device)
        for source, target in pairwise(self.ladder):
            convert_pages(memory, self.shape, source, target, jobs_14)
        move_cells(memory, upload(torch.tensor([(0, self._slot_bytes, 64)]), self.device), 64)
        copy_first_tokens(memory, self.shape, upload(torch.tensor([(0, self._slot_bytes)]), self.device))

    def take_left(self) -> list[int]:
        """Addresses of cells that pages have left since the last call."""
        left, self._left = self._left, []
        return left

    def flush(self) -> None:
        """Queues what was noted: one launch per pair of levels, one for all moves."""
        for levels, jobs in self._jobs.items():
            jobs_N = upload(torch.tensor(jobs), self.device)
            if levels == MOVES:
                move_cells(self._pool, jobs_N, max(num_bytes for _, _, num_bytes in jobs))
            else:
                source, target = (self.ladder[level] for level in levels)
                convert_pages(self._pool, self.shape, source, target, jobs_N)
        self._jobs = {}
        self._read.clear()
        self._written.clear()

    def settle(self) -> None:
        """Waits until the device has done what it was asked for."""
        self.flush()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _note(self, levels: Levels, sources: list[Range], targets: list[Range], job: tuple[int, ...]) -> None:
        """Jobs that are noted together may run in any order: one that meets the bytes of another comes after it."""
        clashes = any(self._read.meets(r) or self._written.meets(r) for r in targets)
        if clashes or any(map(self._written.meets, sources)):
            self.flush()
        self._jobs.setdefault(levels, []).append(job)
        self._read.add(sources)
        self._written.add(targets)
        self._left += [address for address, _ in sources]

    def _cells(self, cell: Cell, level: int) -> list[Range]:
        payload_size, scale_size = self._sizes[level]
        ranges = [(cell.payload, payload_size)]
        if cell.scales >= 0:
            ranges.append((cell.scales, scale_size))
        return ranges


class _Ranges:
    """Byte ranges, by the slot that each of them lies in."""

    def __init__(self, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self._by_slot: dict[int, list[Range]] = {}

    def add(self, ranges: list[Range]) -> None:
        for entry in ranges:
            self._by_slot.setdefault(entry[0] // self._slot_bytes, []).append(entry)

    def meets(self, entry: Range) -> bool:
        begin, size = entry
        others = self._by_slot.get(begin // self._slot_bytes, ())
        return any(begin < other + length and other < begin + size for other, length in others)

    def clear(self) -> None:
        self._by_slot.clear()
