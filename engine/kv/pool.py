"""The paged pool: pages in cells of slots, on a ladder of precisions. Bookkeeping only, no torch.

Ladder level l has a class of payload cells, and for l >= 1 a class of scale cells; both come from the same
slots, so every byte is counted and capacity follows the levels in use. `reserved_slots` are never handed to new
pages: with them a page can be stepped down when nothing else is free.
"""

from collections.abc import Iterable

from kvpilot.engine.errors import ConfigError, KVPilotError, PoolIntegrityError
from kvpilot.engine.kv.formats import BITS, PageShape, payload_bytes, scale_bytes
from kvpilot.engine.kv.page import Page, PageState
from kvpilot.engine.kv.slots import SlotAllocator
from kvpilot.engine.kv.storage import Cell, Conversion, Move, PageStorage


class KVPool:
    """Owns pages and cells: allocation, conversion, compaction."""

    def __init__(
        self, *, shape: PageShape, ladder: tuple[str, ...], pool_bytes: int, storage: PageStorage
    ) -> None:
        self.ladder = ladder
        self.payload_bytes = [payload_bytes(codec, shape) for codec in ladder]
        self.scale_bytes = [scale_bytes(codec, shape) for codec in ladder]
        self.page_bytes = [a + b for a, b in zip(self.payload_bytes, self.scale_bytes, strict=True)]
        slot_bytes = self.payload_bytes[0]
        num_slots = pool_bytes // slot_bytes
        self.last_level = len(ladder) - 1
        self.guard_level = max(i for i, codec in enumerate(ladder) if BITS[codec] >= 8)
        # class l: payload of level l; class num_levels + l - 1: scales of level l >= 1
        self.slots = SlotAllocator(num_slots, slot_bytes, [*self.payload_bytes, *self.scale_bytes[1:]])
        if num_slots < 2 + 2 * self.last_level:
            needed = 2 + 2 * self.last_level
            raise ConfigError(
                f"pool_bytes={pool_bytes} is invalid: expected at least {needed * slot_bytes} for this model, "
                f"{needed} pages of {shape.page_size} tokens ({slot_bytes} bytes each); or a smaller page_size"
            )
        self.counts = [[[0, 0] for _ in ladder] for _ in PageState]  # [state][level][is_sink]
        self.page_reads = [0] * len(ladder)  # pages that one decode step of all readers reads, by level
        self.num_moved = 0
        self._storage = storage
        self._num_quantized_classes = 2 * self.last_level
        self._next_id = 0
        self._pages: dict[int, Page] = {}
        self._owners: dict[int, Page] = {}  # by address of a quantized page's cells: those that may be moved

    # ------------------------------------------------------------------ sizes
    @property
    def num_slots(self) -> int:
        return self.slots.num_slots

    @property
    def reserved_slots(self) -> int:
        """Free slots kept for conversions: one per quantized class that has no open cell, and one more while
        some class has one, because a conversion may fill the last open cells of two classes at once."""
        holes = self.slots.num_classes_with_hole
        return self._num_quantized_classes - holes + (holes > 0)

    @property
    def available_slots(self) -> int:
        """Full-precision pages that could be allocated now (negative while conversions use the reserve)."""
        return self.slots.num_free - self.reserved_slots

    def slots_for(self, pages_by_level: list[int]) -> int:
        """Slots that such pages take when compacted, conversion reserve included."""
        total, has_hole = pages_by_level[0], False
        for level in range(1, len(self.ladder)):
            for cls in (level, self.last_level + level):
                full, rest = divmod(pages_by_level[level], self.slots.per_slot[cls])
                total += full + 1
                has_hole |= rest > 0
        return total + has_hole

    def capacity_pages(self, level: int) -> int:
        """Pages that the pool holds when all of them are at this level."""
        slots = self.num_slots - 2 * self.last_level
        classes = (0,) if level == 0 else (level, self.last_level + level)
        return int(slots / sum((1 / self.slots.per_slot[cls] for cls in classes), 0.0))

    def floor_level(self, page: Page) -> int:
        """Lowest level this page may have: sinks and the last tokens of running sequences keep 8 bits, and no
        page goes below what a request that uses it allows."""
        if page.is_stuck:
            return page.level
        return min(self.guard_level if page.is_sink or page.guards else self.last_level, page.max_level)

    def num_pages(self, state: PageState, level: int | None = None) -> int:
        rows = self.counts[state] if level is None else [self.counts[state][level]]
        return sum(map(sum, rows))

    # ------------------------------------------------------------------ pages
    def allocate(self) -> Page:
        """A new open page at level 0 with one user. The caller has made room: `available_slots` > 0."""
        assert self.available_slots > 0, "allocate() without room"
        address = self.slots.allocate(0)
        assert address is not None
        page = Page(self._next_id, address)
        self._next_id += 1
        self._pages[page.page_id] = page
        self._count(page, 1)
        return page

    def free(self, page: Page) -> None:
        del self._pages[page.page_id]
        self._count(page, -1)
        self._free_cells(page.payload, page.scales)

    def add_readers(self, pages: Iterable[Page], num: int) -> None:
        """A decoding sequence begins (num 1) or ends (num -1) to read these pages in every step."""
        for page in pages:
            page.readers += num
            self.page_reads[page.level] += num

    def set_state(self, page: Page, state: PageState) -> None:
        self._count(page, -1)
        page.state = state
        self._count(page, 1)

    def seal(self, page: Page, *, is_sink: bool) -> None:
        """The page is full: its content will not change, only its precision may."""
        assert not page.is_sealed
        self._count(page, -1)
        page.is_sealed, page.is_sink = True, is_sink
        self._count(page, 1)

    def _count(self, page: Page, num: int) -> None:
        self.counts[page.state][page.level][page.is_sink] += num

    # ------------------------------------------------------------------ precision
    def has_cells(self, level: int) -> bool:
        """A page can be stepped down to this level now, if need be after compaction.

        Almost always true: the reserve is kept for it. Several conversions in a row may fill the last open cells
        of two classes at once before they have emptied a slot.
        """
        classes = (level, self.last_level + level)
        while self.slots.num_free < sum(not self.slots.has_hole(cls) for cls in classes):
            if not self.compact():
                return False
        return True

    def step_down(self, page: Page) -> bool:
        """Re-encode a sealed page one rung lower, where `has_cells`.

        False if its values cannot be encoded (NaN or inf): the page stays as it was and is stuck at its level.
        """
        assert page.is_sealed
        assert page.level < self.last_level
        level = page.level + 1
        payload, scales = self.slots.allocate(level), self.slots.allocate(self.last_level + level)
        assert payload is not None, "step_down() without room"
        assert scales is not None, "step_down() without room"
        # tuple.__new__ costs a third of what a NamedTuple's own constructor does
        source = tuple.__new__(Cell, (page.payload, page.scales))
        target = tuple.__new__(Cell, (payload, scales))
        try:
            self._storage.convert([tuple.__new__(Conversion, (source, page.level, target, level))])
        except KVPilotError:
            self.slots.free(payload)
            self.slots.free(scales)
            page.is_stuck = True
            return False
        self._free_cells(page.payload, page.scales)
        self._count(page, -1)
        self.page_reads[page.level] -= page.readers
        page.level, page.payload, page.scales = level, payload, scales
        self.page_reads[page.level] += page.readers
        self._count(page, 1)
        self._owners[payload] = self._owners[scales] = page
        return True

    def compact(self) -> bool:
        """Free one slot by moving the cells of the emptiest one into holes of others; False if none is to be won."""
        if not self.slots.may_compact:
            return False
        for cls in range(1, len(self.slots.cell_bytes)):
            addresses = self.slots.sparse_slot(cls)
            if addresses:
                self._storage.move([self._relocate(cls, address) for address in addresses])
                self.num_moved += len(addresses)
                return True
        return False

    def check_integrity(self) -> None:
        """Raise PoolIntegrityError, with all numbers, unless pages, cells, states and levels balance."""
        self.slots.check_integrity()
        counts = [[[0, 0] for _ in self.ladder] for _ in PageState]
        cells = 0
        for page in self._pages.values():
            counts[page.state][page.level][page.is_sink] += 1
            cells += 2 * (page.level > 0)
            owner = self._owners.get(page.payload, page)
            if owner is not page or (page.scales >= 0) != (page.level > 0):
                raise PoolIntegrityError(
                    f"page {page.page_id} at level {page.level}: cells {page.payload}, {page.scales}"
                )
            if page.scales >= 0 and self._owners.get(page.scales) is not page:
                raise PoolIntegrityError(f"page {page.page_id}: scale cell {page.scales} has another owner")
            if (page.refs > 0) != (page.state == PageState.LIVE) or (page.level > 0 and not page.is_sealed):
                raise PoolIntegrityError(
                    f"page {page.page_id}: {page.refs} users, state {page.state.name}, level {page.level}, "
                    f"sealed {page.is_sealed}"
                )
        reads = [0] * len(self.ladder)
        for page in self._pages.values():
            reads[page.level] += page.readers
        if reads != self.page_reads:
            raise PoolIntegrityError(f"page reads by level: counted {reads}, booked {self.page_reads}")
        if counts != self.counts:
            raise PoolIntegrityError(f"pages by state, level, sink: counted {counts}, booked {self.counts}")
        booked = sum(self.slots.used_cells[1:])
        full = sum(page.level == 0 for page in self._pages.values())
        if full != self.slots.used_cells[0]:
            raise PoolIntegrityError(f"full-precision pages: {full}, slots {self.slots.used_cells[0]}")
        if cells != len(self._owners) or cells != booked:
            raise PoolIntegrityError(f"cells: pages hold {cells}, owners {len(self._owners)}, slots {booked}")

    # ------------------------------------------------------------------ cells
    def _free_cells(self, payload: int, scales: int) -> None:
        self.slots.free(payload)
        if scales >= 0:
            self.slots.free(scales)
            del self._owners[payload]
            del self._owners[scales]

    def _relocate(self, cls: int, address: int) -> Move:
        page = self._owners[address]
        del self._owners[address]
        target = self.slots.relocate(address)
        self._owners[target] = page
        if cls <= self.last_level:
            page.payload = target
        else:
            page.scales = target
        return tuple.__new__(Move, (address, target, self.slots.cell_bytes[cls]))
