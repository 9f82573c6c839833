"""Where the pages of a batch of sequences are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class PageCells(Protocol):
    """What attention needs to know of a page of the pool."""

    @property
    def level(self) -> int: ...
    @property
    def payload(self) -> int: ...
    @property
    def scales(self) -> int: ...


def page_cells(pages: Sequence[PageCells]) -> NDArray[np.int64]:
    """(level, payload offset, scales offset) of each page, [N, 3]."""
    flat = [value for page in pages for value in (page.level, page.payload, page.scales)]
    return np.array(flat, dtype=np.int64).reshape(-1, 3)


@dataclass(frozen=True, kw_only=True)
class PageTable:
    """Pages of B sequences, one sequence after another; all pages are full but the last of each sequence."""

    cells: NDArray[np.int64]  # (level, payload offset, scales offset)
    indptr: NDArray[np.int64]  # [B + 1]; sequence b has rows indptr[b] to indptr[b + 1]
    num_tokens: NDArray[np.int64]  # [B], each > 0
