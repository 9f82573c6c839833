import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from kvpilot.env.traces.blocks import offsets_of
from kvpilot.env.traces.trace import Trace


@dataclass
class Talk:
    """Conversations with real tokens: the truth that block ids stand for."""

    prompts: list[tuple[int, ...]]
    replies: list[tuple[int, ...]]
    arrivals: list[float]
    sessions: list[int]
    turns: list[int]
    ids: dict[tuple[int, ...], int] = field(default_factory=dict)

    def id_of(self, tokens: tuple[int, ...]) -> int:
        return self.ids.setdefault(tokens, len(self.ids))

    def trace(self, block_size: int) -> Trace:
        chains = [
            [self.id_of(p[:end]) for end in range(block_size, len(p) + 1, block_size)] for p in self.prompts
        ]
        return Trace(
            arrival_seconds=np.array(self.arrivals),
            prompt_tokens=np.array([len(p) for p in self.prompts]),
            output_tokens=np.array([len(r) for r in self.replies]),
            block_ids=np.array([x for chain in chains for x in chain], dtype=np.int64),
            block_offsets=offsets_of([len(chain) for chain in chains]),
            block_size=block_size,
            session=np.array(self.sessions),
            turn=np.array(self.turns),
            tenant=np.zeros(len(chains), dtype=np.int64),
        )


@pytest.fixture(scope="session")
def talk() -> Callable[..., Talk]:
    """Seeded conversations, in order of arrival. With `preamble`, all begin with the same so many tokens."""

    def make(seed: int, num_sessions: int = 6, preamble: int = 8, max_turns: int = 5) -> Talk:
        rng = np.random.default_rng(seed)

        def words(low: int, high: int) -> tuple[int, ...]:
            return tuple(rng.integers(1000, size=rng.integers(low, high)).tolist())

        system = tuple(range(2000, 2000 + preamble))
        rows = []
        for session in range(num_sessions):
            history, when = (*system, 5000 + session), rng.uniform(0, 50)
            for turn in range(1, rng.integers(1, max_turns + 1) + 1):
                prompt, reply = history + words(1, 30), words(1, 20)
                rows.append((when, prompt, reply, session, turn))
                history, when = prompt + reply, when + rng.uniform(0.1, 30)
        when, prompts, replies, sessions, turns = zip(*sorted(rows), strict=True)
        return Talk(list(prompts), list(replies), list(when), list(sessions), list(turns))

    return make


@pytest.fixture(scope="session")
def data() -> Path:
    return Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def real_traces() -> Path:
    """Recorded traffic is not part of the repository: KVPILOT_TRACES says where it lies."""
    folder = os.environ.get("KVPILOT_TRACES")
    if not folder:
        pytest.skip("KVPILOT_TRACES is not set")
    return Path(folder)
