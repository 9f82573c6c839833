"""The pool's bytes in GPU memory, pages in the layout of `kvpilot.engine.kernels.gpu.layout`. Needs triton."""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from kvpilot.engine.errors import ConfigError
from kvpilot.engine.kernels.gpu.convert import convert_pages
from kvpilot.engine.kernels.gpu.layout import check_supported
from kvpilot.engine.kv.formats import PageShape, payload_bytes
from kvpilot.engine.kv.storage import Cell, Conversion, Move


class CudaStorage:
    """Implements PageStorage over a uint8 tensor of `pool_bytes` bytes; `num_heads` are the query heads.

    Work is queued on the current stream: nothing waits for the GPU. A page that holds NaN or infinite values is
    never refused: it keeps them at every precision.
    """

    def __init__(
        self,
        shape: PageShape,
        ladder: Sequence[str],
        pool_bytes: int,
        num_heads: int,
        device: torch.device,
    ) -> None:
        self.shape = shape
        self.ladder = tuple(ladder)
        check_supported(shape, self.ladder, num_heads)
        self._slot_bytes = payload_bytes(self.ladder[0], shape)
        if pool_bytes < self._slot_bytes:
            raise ConfigError(
                f"pool_bytes={pool_bytes} is invalid: expected at least one {self.ladder[0]} page of "
                f"{self._slot_bytes} bytes"
            )
        self.pool: Tensor = torch.empty(pool_bytes, dtype=torch.uint8, device=device)

    def convert(self, conversions: list[Conversion]) -> None:
        """Re-encodes pages in order: one launch for those in a row that have the same levels and of which none
        writes into a slot that another one reads."""
        for (from_level, to_level), group in groupby(conversions, key=lambda c: (c.from_level, c.to_level)):
            jobs: list[tuple[int, ...]] = []
            read: set[int] = set()
            written: set[int] = set()
            for conversion in group:
                sources, targets = self._slots(conversion.source), self._slots(conversion.target)
                if targets & (read | sources) or sources & written:
                    self._launch(from_level, to_level, jobs)
                    jobs, read, written = [], set(), set()
                jobs.append((*conversion.source, *conversion.target))
                read |= sources
                written |= targets
            self._launch(from_level, to_level, jobs)

    def _slots(self, cell: Cell) -> set[int]:
        return {offset // self._slot_bytes for offset in cell if offset >= 0}

    def _launch(self, from_level: int, to_level: int, jobs: list[tuple[int, ...]]) -> None:
        if not jobs:
            return
        jobs_N4 = torch.tensor(jobs, device=self.pool.device)
        convert_pages(self.pool, self.shape, self.ladder[from_level], self.ladder[to_level], jobs_N4)

    def move(self, moves: list[Move]) -> None:
        """Copies byte ranges, in order."""
        for source, target, num_bytes in moves:
            self.pool[target : target + num_bytes].copy_(self.pool[source : source + num_bytes])
