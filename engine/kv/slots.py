"""Slab allocation of the pool's bytes: slots of one full-precision page, cut into equal cells of one class.

A slot is free or belongs to one class; it changes class only when empty. Class 0 has the size of a slot. An
address is a byte offset, `slot * slot_bytes + index * cell_bytes[class]`.
"""

from collections.abc import Sequence

from kvpilot.engine.errors import PoolIntegrityError

FREE = -1


class SlotAllocator:
    """Owns which cell is taken. Knows nothing of pages."""

    def __init__(self, num_slots: int, slot_bytes: int, cell_bytes: Sequence[int]) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.cell_bytes = tuple(cell_bytes)
        self.per_slot = tuple(slot_bytes // size for size in cell_bytes)
        self.used_cells = [0] * len(cell_bytes)
        self._class = [FREE] * num_slots
        self._mask = [0] * num_slots  # bit i: cell i is taken
        self._taken = [0] * num_slots  # bits in the mask
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self._partial: list[dict[int, None]] = [{} for _ in cell_bytes]  # slots with a taken and an open cell
        self._num_partial = 0  # over all classes
        self.num_classes_with_hole = 0  # classes of which a cell can be had without a free slot

    @property
    def num_free(self) -> int:
        return len(self.free_slots)

    def has_hole(self, cls: int) -> bool:
        """A cell of this class can be had without a free slot."""
        return bool(self._partial[cls])

    def allocate(self, cls: int) -> int | None:
        """Address of a cell, from a partly filled slot if there is one; None if neither that nor a free slot."""
        for slot in self._partial[cls]:
            return self._take_cell(cls, slot)
        if not self.free_slots:
            return None
        slot = self.free_slots.pop()
        self._class[slot], self._mask[slot], self._taken[slot] = cls, 1, 1
        self.used_cells[cls] += 1
        if self.per_slot[cls] > 1:
            self._add_partial(cls, slot)
        return slot * self.slot_bytes

    def _take_cell(self, cls: int, slot: int) -> int:
        """The first open cell of a partly filled slot."""
        mask = self._mask[slot]
        bit = ~mask & (mask + 1)
        self._mask[slot] = mask + bit
        self._taken[slot] += 1
        self.used_cells[cls] += 1
        if self._taken[slot] == self.per_slot[cls]:
            self._remove_partial(cls, slot)
        index = bit.bit_length() - 1
        return slot * self.slot_bytes + index * self.cell_bytes[cls]

    def free(self, address: int) -> None:
        slot = address // self.slot_bytes
        cls = self._class[slot]
        assert cls != FREE, f"slot of {address} is free"
        bit = 1 << ((address - slot * self.slot_bytes) // self.cell_bytes[cls])
        mask = self._mask[slot]
        assert mask & bit, f"cell at {address} is not taken"
        self._mask[slot] = mask - bit
        taken = self._taken[slot]
        self._taken[slot] = taken - 1
        self.used_cells[cls] -= 1
        if taken > 1:
            if taken == self.per_slot[cls]:
                self._add_partial(cls, slot)
            return
        if self.per_slot[cls] > 1:
            self._remove_partial(cls, slot)
        self._class[slot] = FREE
        self.free_slots.append(slot)

    @property
    def may_compact(self) -> bool:
        """Some class has more than one partly filled slot."""
        return self._num_partial > self.num_classes_with_hole

    def _add_partial(self, cls: int, slot: int) -> None:
        partial = self._partial[cls]
        if slot not in partial:
            self.num_classes_with_hole += not partial
            self._num_partial += 1
            partial[slot] = None

    def _remove_partial(self, cls: int, slot: int) -> None:
        partial = self._partial[cls]
        if slot in partial:
            del partial[slot]
            self._num_partial -= 1
            self.num_classes_with_hole -= not partial

    def sparse_slot(self, cls: int) -> list[int] | None:
        """Addresses of the cells of the emptiest slot of this class whose cells fit into the holes of others.

        None if the class has no whole slot to win. The caller moves those cells (see `vacate`).
        """
        partial = self._partial[cls]
        if len(partial) < 2:
            return None
        slot, taken, taken_in_all = -1, 0, 0
        for other in partial:
            count = self._taken[other]
            taken_in_all += count
            if slot < 0 or count < taken or (count == taken and other < slot):
                slot, taken = other, count
        per_slot = self.per_slot[cls]
        if (len(partial) - 1) * per_slot - (taken_in_all - taken) < taken:
            return None
        base, size, mask = slot * self.slot_bytes, self.cell_bytes[cls], self._mask[slot]
        return [base + i * size for i in range(per_slot) if mask >> i & 1]

    def relocate(self, address: int) -> int:
        """Take a cell of the same class in another partly filled slot and free this one; returns the new address."""
        slot = address // self.slot_bytes
        cls = self._class[slot]
        self._remove_partial(cls, slot)  # so that the new cell is not in the slot being emptied
        target = self.allocate(cls)
        assert target is not None
        self._add_partial(cls, slot)
        self.free(address)
        return target

    def check_integrity(self) -> None:
        """Raise PoolIntegrityError unless free + taken slots and the cells of every class add up."""
        counts = [0] * len(self.cell_bytes)
        for slot, (cls, mask) in enumerate(zip(self._class, self._mask, strict=True)):
            taken = self._taken[slot]
            if (cls == FREE) != (mask == 0) or mask.bit_count() != taken:
                raise PoolIntegrityError(
                    f"slot {slot}: class {cls} with taken cells {mask:b}, {taken} booked"
                )
            if cls == FREE:
                continue
            counts[cls] += mask.bit_count()
            full = mask == (1 << self.per_slot[cls]) - 1
            if full == (slot in self._partial[cls]):
                raise PoolIntegrityError(
                    f"slot {slot}: cells {mask:b} of class {cls}, partial list disagrees"
                )
        partial = [len(slots) for slots in self._partial]
        if sum(partial) != self._num_partial or sum(map(bool, partial)) != self.num_classes_with_hole:
            booked = (self._num_partial, self.num_classes_with_hole)
            raise PoolIntegrityError(f"partial slots by class: counted {partial}, booked {booked}")
        if counts != self.used_cells:
            raise PoolIntegrityError(f"cells by class: counted {counts}, booked {self.used_cells}")
        num_free = sum(cls == FREE for cls in self._class)
        if num_free != self.num_free or len(set(self.free_slots)) != self.num_free:
            raise PoolIntegrityError(f"free slots: counted {num_free}, booked {self.num_free}")
