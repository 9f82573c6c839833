"""Knob changes: all or nothing, with a revision that makes races visible."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from kvpilot.engine.config import EngineConfig, Knobs
from kvpilot.engine.errors import ConfigError, KnobInvalidError, KnobStaleError
from kvpilot.engine.knobs import KnobStore


@pytest.fixture
def store() -> KnobStore:
    return KnobStore(EngineConfig(max_batch_ceiling=32))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ttl_seconds", -1),
        ("ttl_seconds", 86401),
        ("ttl_seconds", float("nan")),
        ("ttl_seconds", float("inf")),
        ("size_factor", 1.01),
        ("size_factor", "0.5"),
        ("max_batch", 0),
        ("max_batch", 33),
        ("max_batch", 2.5),
        ("max_batch", True),
        ("max_batch", 10**400),
        ("kv_level", 3),
        ("kv_level", None),
        ("kv_level", [1]),
        ("page_size", 16),
    ],
)
def test_an_invalid_value_names_field_value_and_bounds_and_nothing_is_applied(store, field, value):
    before = store.requested
    with pytest.raises(KnobInvalidError) as caught:
        store.patch({"size_factor": 0.25, field: value}, None, 0)
    assert caught.value.field == field
    assert repr(value) in str(caught.value)
    assert caught.value.bounds in str(caught.value)
    assert store.requested is before
    assert store.revision == 1


def test_a_stale_revision_is_refused_and_nothing_is_applied(store):
    store.patch({"kv_level": 1}, 1, 0)
    with pytest.raises(KnobStaleError, match="expected_revision=1 is stale: the current revision is 2"):
        store.patch({"kv_level": 2}, 1, 0)
    assert store.requested.kv_level == 1


def test_results_say_what_happened_to_each_knob(store):
    patch = store.patch({"kv_level": 0, "ttl_seconds": 5, "max_batch": 2}, None, num_running=7)
    assert patch.results == {"kv_level": "unchanged", "ttl_seconds": "applied", "max_batch": "deferred"}
    assert store.state(7).effective == Knobs(ttl_seconds=5.0, max_batch=7)
    assert store.state(7).deferred == ("max_batch",)
    assert store.state(2).effective == Knobs(ttl_seconds=5.0, max_batch=2)


def test_a_change_to_the_present_values_keeps_the_revision(store):
    assert store.patch({"kv_level": 0}, 1, 0).revision == 1


def test_of_racing_writers_with_one_revision_exactly_one_wins(store):
    def attempt(value: int) -> bool:
        try:
            store.patch({"max_batch": value}, 1, 0)
        except KnobStaleError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(1, 9))) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pool_bytes", 0),
        ("page_size", 3),
        ("ladder", ()),
        ("ladder", ("int8",)),
        ("ladder", ("bf16", "int9")),
        ("ladder", ("bf16", "int4", "int8")),
        ("max_batch_ceiling", 0),
        ("prefill_chunk", 0),
        ("eviction", "fifo"),
        ("reserve_fraction", 0.5),
        ("starvation_seconds", float("nan")),
        ("knobs", Knobs(kv_level=3)),
    ],
)
def test_an_envelope_out_of_bounds_names_the_field(field, value):
    with pytest.raises(ConfigError, match=f"^{field}"):
        EngineConfig(**{field: value})
