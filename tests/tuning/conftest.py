"""Recorded traffic made by hand, small enough that an episode takes a fraction of a second."""

import os
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest

from kvpilot.env.simulator.latency import LatencyProfile, ProfiledModel
from kvpilot.env.slo import Slo
from kvpilot.env.traces import files
from kvpilot.env.traces.trace import Trace
from kvpilot.env.tuning.episode import Episode
from kvpilot.env.tuning.traffic import Stream
from kvpilot.env.tuning.workload import Regime, StreamSpec, Workload

BLOCK = 8
TRACE, PROFILE = "sessions.jsonl", "profile.json"
MODEL = ProfiledModel(name="none", num_layers=2, num_kv_heads=1, head_dim=64, max_len=1000)
SLOT_BYTES = MODEL.page_shape(BLOCK).num_values * 2


def _make_sessions(num_sessions: int, seed: int = 3) -> Trace:
    """Sessions of 1 to 6 turns behind one shared block: each prompt goes on where prompt and reply before it ended."""
    rng = np.random.default_rng(seed)
    rows = []
    for session in range(num_sessions):
        at, length = rng.uniform(0, 50), BLOCK * 2
        for turn in range(1, 1 + int(rng.integers(1, 7))):
            length += int(rng.integers(5, 60))
            reply = int(rng.integers(2, 40))
            rows.append((at, session, turn, length, reply))
            at, length = at + rng.uniform(1, 8), length + reply
    rows.sort()
    arrival, session, turn, prompt, reply = (np.array(column) for column in zip(*rows, strict=True))
    chains = [
        [0, *(1000 * (int(s) + 1) + k for k in range(1, int(p) // BLOCK))]
        for s, p in zip(session, prompt, strict=True)
    ]
    return Trace(
        arrival_seconds=arrival,
        prompt_tokens=prompt,
        output_tokens=reply,
        block_ids=np.array([block for chain in chains for block in chain]),
        block_offsets=np.array([0, *accumulate(map(len, chains))]),
        block_size=BLOCK,
        session=session,
        turn=turn,
        tenant=np.zeros(len(rows), dtype=np.int64),
        think_seconds=np.where(turn > 1, 2.0, np.nan),
    )


@pytest.fixture(scope="session")
def make_sessions():
    return _make_sessions


@pytest.fixture(scope="session")
def write_trace():
    return files.write_trace


@pytest.fixture(scope="session")
def profile() -> LatencyProfile:
    return LatencyProfile(
        name="test",
        fixed=0.01,
        prefill_token=1e-3,
        prefill_pair=1e-6,
        sequence=1e-3,
        kv_byte={"bf16": 1e-8, "int8": 1e-8, "int4": 1.5e-8},
        convert={"int8": 1e-3, "int4": 1e-3},
        moved_byte=1e-9,
        origin={"calibrated": False},
        model=MODEL,
        engine={
            "page_size": BLOCK,
            "prefill_chunk": 64,
            "max_batch_ceiling": 16,
            "max_batch": 8,
            "tail_tokens": 16,
        },
        quality_loss={"int8": 7e-5, "int4": 0.0012},
    )


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, profile: LatencyProfile) -> Path:
    """Of traces: one file of 100 sessions, and the profile."""
    made = tmp_path_factory.mktemp("traces")
    files.write_trace(_make_sessions(100), made / TRACE)
    profile.write(made / PROFILE)
    return made


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    made = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("KVPILOT_CACHE", str(made))
    return made


@pytest.fixture
def episode(folder: Path) -> Episode:
    """Users come, more of them come, some leave; and a few sessions start whatever the engine does. 70 pages."""
    return Episode(
        family="test",
        folder=str(folder),
        streams=(
            Stream(file=TRACE, loop="closed", level=((0.0, 4.0), (50.0, 12.0), (90.0, 5.0))),
            Stream(file=TRACE, loop="open", level=((0.0, 0.1), (60.0, 0.3), (100.0, 0.0))),
        ),
        phases=((0.0, "quiet"), (50.0, "busy"), (90.0, "late")),
        seed=7,
        seconds=120.0,
        warmup_seconds=30.0,
        interval_seconds=10.0,
        pool_bytes=130 * SLOT_BYTES,
        page_size=BLOCK,
        profile=str(folder / PROFILE),
        slo=Slo(ttft_seconds=1.0, inter_token_seconds=0.1),
    )


@pytest.fixture
def workload(folder: Path) -> Workload:
    return Workload(
        name="small",
        folder=str(folder),
        streams={
            "users": StreamSpec(file=TRACE, loop="closed"),
            "batch": StreamSpec(file=TRACE, loop="one-off"),
        },
        regimes={
            "quiet": Regime(seconds=(20.0, 40.0), levels={"users": (2.0, 4.0)}),
            "busy": Regime(seconds=(20.0, 40.0), levels={"users": (8.0, 14.0)}),
            "batch": Regime(seconds=(20.0, 40.0), levels={"users": (2.0, 4.0), "batch": (0.2, 0.5)}),
        },
        seconds=(80.0, 120.0),
        warmup_seconds=20.0,
        interval_seconds=10.0,
        pool_bytes=130 * SLOT_BYTES,
        page_size=BLOCK,
        profile=str(folder / PROFILE),
        slo=Slo(ttft_seconds=1.0, inter_token_seconds=0.1),
    )


@pytest.fixture(scope="session")
def real_traces() -> Path:
    """Recorded traffic is not part of the repository: KVPILOT_TRACES says where it lies."""
    found = os.environ.get("KVPILOT_TRACES")
    if not found:
        pytest.skip("KVPILOT_TRACES is not set")
    return Path(found)
