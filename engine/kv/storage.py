"""Where page bytes live, seen from the pool's bookkeeping. `TorchStorage` moves real bytes, `NoStorage` none."""

from typing import NamedTuple, Protocol


class Cell(NamedTuple):
    """A page's place: byte offsets into the pool of its codes and of its scales (-1: none)."""

    payload: int
    scales: int


class Conversion(NamedTuple):
    """One page re-encoded from `source` at ladder index `from_level` to `target` at `to_level`."""

    source: Cell
    from_level: int
    target: Cell
    to_level: int


class Move(NamedTuple):
    """`num_bytes` copied within the pool, from byte offset `source` to `target`."""

    source: int
    target: int
    num_bytes: int


class PageStorage(Protocol):
    """Executes what the bookkeeping decided, as if in order; the offsets of one call may overlap over time
    (a target may be the source of an earlier entry), never within one entry."""

    def convert(self, conversions: list[Conversion]) -> None: ...

    def move(self, moves: list[Move]) -> None: ...


class NoStorage:
    """Bookkeeping only: the simulator and most tests."""

    def convert(self, conversions: list[Conversion]) -> None:
        pass

    def move(self, moves: list[Move]) -> None:
        pass


class CountingStorage:
    """Passes everything on and counts it: pages converted, by level reached, and bytes moved."""

    def __init__(self, inner: PageStorage, num_levels: int) -> None:
        self._inner = inner
        self.converted = [0] * num_levels
        self.moved_bytes = 0

    def convert(self, conversions: list[Conversion]) -> None:
        self._inner.convert(conversions)
        for conversion in conversions:
            self.converted[conversion.to_level] += 1

    def move(self, moves: list[Move]) -> None:
        self._inner.move(moves)
        self.moved_bytes += sum(move.num_bytes for move in moves)
