"""What is refused before a replay begins."""

import math
from dataclasses import replace

import pytest

from kvpilot.engine.errors import ConfigError
from kvpilot.engine.kv.formats import payload_bytes
from kvpilot.env.replay.limits import MAX_PAGES, MAX_WINDOWS, check_losses, check_number, window_of


def test_windows_are_a_120th_or_what_is_asked_for():
    assert window_of(None, 1200.0, name="w") == 10.0
    assert window_of(None, 5.0, name="w") == 1.0
    assert window_of(0.5, 1200.0, name="w") == 0.5
    assert window_of(1.0, float(MAX_WINDOWS), name="w") == 1.0
    with pytest.raises(ConfigError, match=r"w=0.1 .* 36,000 windows in 3,600 s, .* 10,000: at least 0.36 s"):
        window_of(0.1, 3600.0, name="w")


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 0.0])
def test_numbers_out_of_bounds_are_named(value):
    with pytest.raises(ConfigError, match=f"x={value:g} .* > 0"):
        check_number(value, name="x", above=0.0)


@pytest.mark.parametrize("change", [{"end_seconds": 0.0}, {"window_seconds": math.inf}, {"seed": -1}])
def test_a_simulated_replay_has_bounds(replay, change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        replace(replay, **change)


def test_a_pool_of_more_pages_than_fit_here_is_refused_before_it_is_made(replay):
    page = payload_bytes("bf16", replay.model.page_shape(replay.engine.page_size))
    replace(replay, engine=replay.engine.with_(pool_bytes=MAX_PAGES * page))
    with pytest.raises(ConfigError, match=r"pool_bytes=.*expected at most 8,388,608, .*--pool-mb"):
        replace(replay, engine=replay.engine.with_(pool_bytes=(MAX_PAGES + 1) * page))


@pytest.mark.parametrize("field", ["kv_byte", "convert"])
def test_a_profile_knows_the_cost_of_every_codec(replay, field):
    costs = {codec: cost for codec, cost in getattr(replay.profile, field).items() if codec != "int4"}
    with pytest.raises(ConfigError, match=f"'test' has no {field} for int4"):
        replace(replay, profile=replace(replay.profile, **{field: costs}))


def test_the_loss_of_every_allowed_codec_is_known():
    ladder = ("bf16", "int8", "int4")
    check_losses({"int8": 0.1}, ladder, 1, source="p")
    with pytest.raises(ConfigError, match="'p' has no quality_loss for int4, which kv_level=2 allows"):
        check_losses({"int8": 0.1}, ladder, 2, source="p")
