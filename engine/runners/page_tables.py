"""Where the pages of running requests are, kept from step to step: asking every page in every step would take
longer than the GPU needs for the step."""

from collections.abc import Sequence

import numpy as np

from kvpilot.engine.errors import ConfigError
from kvpilot.engine.kernels.gpu.layout import EXACT, INT4, KINDS
from kvpilot.engine.kv.cuda_storage import CudaStorage
from kvpilot.engine.kv.page import Page
from kvpilot.engine.request import Request, ScheduledRequest

MAX_CELLS = 1 << 28  # of all rows together: 8 GB of host memory


class PageTables:
    """One row per request: its pages in order, and sorted by precision as the decode kernel wants them.

    A row holds for as long as the request has the same list of pages, which only grows, and none of its pages
    has left its cells. The storage says which cells were left.
    """

    def __init__(self, storage: CudaStorage, max_requests: int, max_tokens: int) -> None:
        self._storage = storage
        self._page_size = storage.shape.page_size
        columns = -(-max_tokens // self._page_size)
        if max_requests * columns > MAX_CELLS:
            raise ConfigError(
                f"max_batch_ceiling={max_requests} is invalid with max_model_len={max_tokens}: the page tables "
                f"hold {MAX_CELLS} pages, lower one of the two"
            )
        kinds = [KINDS[codec] for codec in storage.ladder]
        self._column_of_level = np.array([{EXACT: 0, INT4: 2}.get(kind, 1) for kind in kinds])
        self.levels = np.zeros((max_requests, columns), dtype=np.int64)
        self.cells = np.zeros(
            (max_requests, columns, 2), dtype=np.int64
        )  # payload, scales; in order of tokens
        self.sorted = np.zeros((max_requests, columns, 2), dtype=np.int64)  # in units of the decode kernel
        self.counts = np.zeros((max_requests, 3), dtype=np.int64)  # exact, 8-bit and int4 pages
        self._num_known = [0] * max_requests  # pages in the row
        self._pages: list[list[Page] | None] = [None] * max_requests
        self._row_of: dict[Request, int] = {}
        self._free = list(range(max_requests - 1, -1, -1))
        self._used = (0, 0)  # rows and columns that may hold something

    def rows(self, batch: Sequence[ScheduledRequest], spares: Sequence[int] = ()) -> list[int]:
        """The row of each request, brought up to date; it holds the pages of the tokens up to the batch's last.

        A page that a request does not have yet is taken from `spares`, addresses of open pages, in this call only.
        """
        self._forget_left()
        rows, spare = [], iter(spares)
        for request, start, num_new, _ in batch:
            row = self._row_of.get(request)
            if row is None:
                row = self._take_row(request, batch)
            if self._pages[row] is not request.pages:
                self._pages[row] = request.pages
                self._num_known[row] = 0
            wanted = -(-(start + num_new) // self._page_size)
            if self._num_known[row] != wanted:
                if wanted <= len(request.pages):
                    self._fill(row, request.pages, wanted)
                else:
                    self._fill(row, [*request.pages, Page(-1, next(spare))], wanted)
                    self._num_known[row] = 0
            rows.append(row)
        return rows

    def _forget_left(self) -> None:
        left = self._storage.take_left()
        if not left:
            return
        rows, columns = self._used
        hit = np.isin(self.cells[:rows, :columns], left).any(axis=(1, 2))
        for row in np.flatnonzero(hit).tolist():
            self._num_known[row] = 0

    def _take_row(self, request: Request, batch: Sequence[ScheduledRequest]) -> int:
        if not self._free:
            present = {entry.request for entry in batch}
            for other in [other for other in self._row_of if other not in present]:
                row = self._row_of.pop(other)
                self._pages[row] = None
                self._free.append(row)
        row = self._row_of[request] = self._free.pop()
        return row

    def _fill(self, row: int, pages: list[Page], wanted: int) -> None:
        known = self._num_known[row]
        if known > wanted:
            known = 0
        new = pages[known:wanted]
        self.levels[row, known:wanted] = [page.level for page in new]
        self.cells[row, known:wanted, 0] = [page.payload for page in new]
        self.cells[row, known:wanted, 1] = [page.scales for page in new]
        column = self._column_of_level[self.levels[row, :wanted]]
        order = column.argsort(kind="stable")  # the open page stays the last exact one
        self.sorted[row, :wanted] = self.cells[row, order] // (16, 4)
        self.counts[row] = np.bincount(column, minlength=3)
        self._num_known[row] = wanted
        self._used = (max(self._used[0], row + 1), max(self._used[1], wanted))
