from itertools import accumulate

import numpy as np
import pytest

from kvpilot.engine.config import EngineConfig, Knobs
from kvpilot.env.replay.sim import SimReplay
from kvpilot.env.simulator.latency import LatencyProfile, ProfiledModel
from kvpilot.env.slo import Slo
from kvpilot.env.traces.trace import Trace

BLOCK = 8


@pytest.fixture
def chats() -> Trace:
    """40 sessions of up to 4 turns: each prompt goes on where prompt and reply before it ended."""
    rng = np.random.default_rng(3)
    rows = []
    for session in range(40):
        at, length = rng.uniform(0, 20), BLOCK * 2
        for turn in range(1, 1 + int(rng.integers(1, 5))):
            length += int(rng.integers(5, 60))
            reply = int(rng.integers(2, 40))
            rows.append((at, session, turn, length, reply))
            at, length = at + rng.uniform(1, 8), length + reply
    rows.sort()
    arrival, session, turn, prompt, reply = (np.array(column) for column in zip(*rows, strict=True))
    chains = [
        [0, 1, *(1000 * (int(s) + 1) + k for k in range(2, int(p) // BLOCK))]
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


@pytest.fixture
def replay() -> SimReplay:
    """A pool of 64 pages: too few for all sessions."""
    model = ProfiledModel(name="none", num_layers=2, num_kv_heads=1, head_dim=64, max_len=1000)
    profile = LatencyProfile(
        name="test",
        fixed=0.01,
        prefill_token=1e-4,
        prefill_pair=1e-6,
        sequence=1e-3,
        kv_byte={"bf16": 1e-8, "int8": 1e-8, "int4": 1.5e-8},
        convert={"int8": 1e-3, "int4": 1e-3},
        moved_byte=1e-9,
        origin={"calibrated": False},
        model=model,
        engine={"page_size": BLOCK},
        quality_loss={"int8": 0.001, "int4": 0.01},
    )
    shape = model.page_shape(BLOCK)
    config = EngineConfig(
        pool_bytes=64 * shape.num_values * 2,
        page_size=BLOCK,
        prefill_chunk=64,
        max_batch_ceiling=8,
        tail_tokens=16,
        knobs=Knobs(max_batch=8),
    )
    slo = Slo(ttft_seconds=0.2, inter_token_seconds=0.05)
    return SimReplay(profile=profile, engine=config, slo=slo, window_seconds=5.0)
