"""Who continues whom: sessions and turns where a source names none, and the turn that repeats a reply."""

from typing import TYPE_CHECKING

import numpy as np

from kvpilot.env.traces.blocks import Ints, densify

if TYPE_CHECKING:
    from kvpilot.env.traces.trace import Trace

MAX_FANOUT = 32  # blocks with more distinct successors are a system prompt, not a conversation


def derive_sessions(block_ids: Ints, block_offsets: Ints) -> tuple[Ints, Ints]:
    """Session and turn of each request, in order of arrival, from the blocks alone.

    A session is all requests that share a block behind the common preamble (blocks that more than MAX_FANOUT
    different blocks follow, and what is before them). The turn is one more than that of the request which last
    used the deepest known block. A prompt that ends within the preamble is a session of its own.
    """
    dense, num_ids = densify(block_ids)
    preamble = _preamble_lengths(dense, block_offsets, num_ids)
    num = len(block_offsets) - 1
    last_turn = np.zeros(num_ids, dtype=np.int64)  # of the request that last used a block
    root_session = np.full(num_ids, -1, dtype=np.int64)  # by the first block behind the preamble
    session, turn = np.empty(num, dtype=np.int64), np.ones(num, dtype=np.int64)
    num_sessions = 0
    for i in range(num):
        chain = dense[block_offsets[i] + preamble[i] : block_offsets[i + 1]]
        if not len(chain) or root_session[chain[0]] < 0:
            session[i] = num_sessions
            num_sessions += 1
        else:
            session[i] = root_session[chain[0]]
            known = int(np.count_nonzero(last_turn[chain]))  # a prefix: ids are chained
            turn[i] = last_turn[chain[known - 1]] + 1
        if len(chain):
            root_session[chain[0]] = session[i]
            last_turn[chain] = turn[i]
    return session, turn


def _preamble_lengths(dense: Ints, offsets: Ints, num_ids: int) -> Ints:
    """i8[N]: how many leading blocks of each request are preamble."""
    counts = np.diff(offsets)
    position = np.arange(len(dense)) - np.repeat(offsets[:-1], counts)
    inner = np.flatnonzero(position[1:] > 0)
    parent_of = np.full(num_ids, -1, dtype=np.int64)
    parent_of[dense[inner + 1]] = dense[inner]
    fanout = np.bincount(parent_of[parent_of >= 0], minlength=num_ids)
    reach = np.where(fanout[dense] > MAX_FANOUT, position + 1, 0)
    lengths = np.zeros(len(counts), dtype=np.int64)
    rows = np.flatnonzero(counts)
    if len(rows):
        lengths[rows] = np.maximum.reduceat(reach, offsets[:-1][rows])
    return lengths


def find_successors(trace: "Trace") -> Ints:
    """i8[N]: see `Trace.successor`.

    Each request continues at most one other: the latest of its session whose last full block is where its own
    known blocks end, so its next block is new and can hold nothing but reply and next message. Prompts without
    a full block of their own session are never continued.
    """
    dense, num_ids = densify(trace.block_ids)
    offsets, session = trace.block_offsets, trace.session
    ends = trace.prompt_tokens + trace.output_tokens
    successor = np.full(len(trace), -1, dtype=np.int64)
    seen = np.zeros(num_ids, dtype=bool)
    ended_at: dict[tuple[int, int], int] = {}  # (session, last full block) -> latest request
    for j in range(len(trace)):
        chain = dense[offsets[j] : offsets[j + 1]]
        if not len(chain):
            continue
        known = int(np.count_nonzero(seen[chain]))
        if 0 < known < len(chain):
            i = ended_at.get((int(session[j]), int(chain[known - 1])))
            if i is not None and successor[i] < 0 and ends[i] <= trace.prompt_tokens[j]:
                successor[i] = j
        seen[chain[known:]] = True
        ended_at[int(session[j]), int(chain[-1])] = j
    return successor
