import numpy as np
import pytest

from kvpilot.engine.step_features import StepFeatures
from kvpilot.env.calibration.measured import MeasuredStep, kind_of
from kvpilot.env.simulator.latency import LatencyProfile

LADDER = ("bf16", "int8", "int4")


@pytest.fixture
def truth() -> LatencyProfile:
    """A profile to be found again; its ramp bends at 8 and at 64 rows."""
    return LatencyProfile(
        name="truth",
        fixed=4e-3,
        prefill_token=2e-5,
        prefill_pair=3e-8,
        prefill_context=4e-6,
        sequence=1e-4,
        kv_byte={"bf16": 1e-10, "int8": 1.5e-10, "int4": 2e-10},
        convert={"int8": 2e-4, "int4": 5e-4},
        moved_byte=2e-10,
        rows=((1, 1e-4), (8, 2e-5), (64, 4e-4)),
        sampled=((0, 3e-4), (16, 1e-4)),
        origin={},
    )


@pytest.fixture
def steps_of():
    """Random steps as an engine would take them, timed by a profile, with relative noise."""

    def make(profile: LatencyProfile, number: int, noise: float) -> list[MeasuredStep]:
        rng, steps = np.random.default_rng(7), []
        for k in range(number):
            decoding = int(rng.integers(0, 33)) if k % 4 else 0
            prefill = int(rng.integers(2, 257)) if k % 3 == 0 or not decoding else 0
            reads = tuple(int(x) for x in rng.integers(0, 30_000_000, 3)) if decoding else (0, 0, 0)
            context = int(rng.integers(1, 1500)) if prefill else 0
            features = StepFeatures(
                prefill,
                prefill * context,
                context,
                decoding,
                decoding + int(rng.integers(0, 2)) if prefill else decoding,
                reads,
                (0, 0, 0),
                0,
            )
            seconds = profile.step_cost(LADDER).seconds(features) * (1 + noise * rng.standard_normal())
            steps.append(MeasuredStep(features, seconds, kind_of(features), True))
        for _ in range(number // 4):
            converted = (0, int(rng.integers(0, 9)), int(rng.integers(1, 9)))
            features = StepFeatures(0, 0, 0, 0, 0, (0, 0, 0), converted, int(rng.integers(0, 4_000_000)))
            seconds = profile.step_cost(LADDER).seconds(features) - profile.fixed
            steps.append(MeasuredStep(features, seconds, "convert", False))
        return steps

    return make
