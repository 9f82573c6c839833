"""The slab allocator: random allocations, frees and compactions keep the books."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot.engine.errors import PoolIntegrityError
from kvpilot.engine.kv.slots import SlotAllocator

actions = st.lists(
    st.tuples(st.sampled_from(["allocate", "free", "compact"]), st.integers(0, 1 << 16)), max_size=200
)


@settings(deadline=None)
@given(actions=actions)
def test_cells_never_overlap_and_compaction_wins_a_slot(actions):
    slots = SlotAllocator(num_slots=12, slot_bytes=64, cell_bytes=[64, 32, 16, 5])
    taken: dict[int, int] = {}  # address -> class
    for action, choice in actions:
        if action == "allocate":
            cls = choice % 4
            address = slots.allocate(cls)
            if address is None:
                assert slots.num_free == 0
                assert not slots.has_hole(cls)
            else:
                taken[address] = cls
        elif action == "free" and taken:
            address = sorted(taken)[choice % len(taken)]
            slots.free(address)
            del taken[address]
        elif action == "compact":
            addresses = slots.sparse_slot(choice % 4)
            if addresses:
                free_before = slots.num_free
                for address in addresses:
                    taken[slots.relocate(address)] = taken.pop(address)
                assert slots.num_free == free_before + 1
        slots.check_integrity()
        spans = sorted((address, address + slots.cell_bytes[cls]) for address, cls in taken.items())
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert sum(slots.used_cells) == len(taken)


def test_compaction_leaves_at_most_one_partial_slot():
    slots = SlotAllocator(num_slots=8, slot_bytes=64, cell_bytes=[64, 16])
    addresses = [slots.allocate(1) for _ in range(32)]
    for address in addresses[::2]:
        assert address is not None
        slots.free(address)
    while moved := slots.sparse_slot(1):
        for address in moved:
            slots.relocate(address)
    slots.check_integrity()
    assert slots.num_free == 4


def test_a_damaged_book_is_reported_with_its_numbers():
    slots = SlotAllocator(num_slots=4, slot_bytes=64, cell_bytes=[64, 16])
    slots.allocate(1)
    slots.used_cells[1] = 3
    with pytest.raises(PoolIntegrityError, match=r"counted \[0, 1\], booked \[0, 3\]"):
        slots.check_integrity()
