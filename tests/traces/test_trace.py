from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot.env.traces.reuse import find_runs, infinite_hit_rate
from kvpilot.env.traces.sessions import MAX_FANOUT, derive_sessions
from kvpilot.env.traces.trace import COLUMNS, Trace, TraceError

SEEDS = st.integers(0, 10_000)


def two(**changes) -> Trace:
    """A prompt of two blocks and one that goes on, 4 tokens per block."""
    values = {
        "arrival_seconds": np.array([0.0, 1.0]),
        "prompt_tokens": np.array([9, 13]),
        "output_tokens": np.array([3, 1]),
        "block_ids": np.array([5, 6, 5, 6, 7]),
        "block_offsets": np.array([0, 2, 5]),
        "block_size": 4,
        "session": np.array([0, 0]),
        "turn": np.array([1, 2]),
        "tenant": np.array([0, 0]),
    }
    return Trace(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arrival_seconds": [1.0, 0.5]}, "arrival_seconds=0.5 of request 1 is invalid: expected not before"),
        ({"arrival_seconds": [0.0, np.nan]}, "arrival_seconds=nan of request 1 is invalid"),
        ({"prompt_tokens": [9, 0]}, "prompt_tokens=0 of request 1 is invalid: expected >= 1"),
        ({"output_tokens": [0, 1]}, "output_tokens=0 of request 0 is invalid: expected >= 1"),
        ({"prompt_tokens": [9, 17]}, "blocks=3 of request 1 is invalid: expected one per 4 tokens"),
        ({"block_ids": [5, 6, 5, -1, 7]}, "blocks: id -1 of request 1 is invalid: expected >= 0"),
        ({"block_ids": [5, 6, 8, 6, 7]}, "blocks: id 6 of request 1 follows different blocks"),
        ({"block_ids": [5, 6, 6, 5, 7]}, "blocks: id 6 of request 1 follows different blocks"),
        ({"block_offsets": [0, 2, 4]}, "block_offsets go from 0 to 4: expected from 0 to 5"),
        ({"session": [0, -1]}, "session=-1 of request 1"),
        ({"turn": [0, 1]}, "turn=0 of request 0"),
        ({"tenant": [0, 0, 0]}, r"tenant has shape \(3,\): expected \(2,\)"),
        ({"think_seconds": np.array([np.nan, -1.0])}, "think_seconds=-1.0 of request 1"),
        ({"block_size": 0}, "block_size=0 is invalid"),
    ],
)
def test_a_malformed_trace_is_refused_by_field_row_and_value(changes, message):
    with pytest.raises(TraceError, match=message):
        two(**changes)


def test_a_trace_cannot_be_changed():
    trace = two()
    with pytest.raises(ValueError, match="read-only"):
        trace.block_ids[0] = 1
    with pytest.raises(FrozenInstanceError):
        trace.block_size = 8  # pyright: ignore[reportAttributeAccessIssue]


def test_selection_keeps_ids_and_order():
    trace = two()
    (row,) = [trace.select([1])]
    assert row.blocks_of(0).tolist() == [5, 6, 7]
    assert trace.select(np.array([False, True])).arrival_seconds.tolist() == [1.0]
    assert len(trace[:1]) == 1
    assert trace[5:].duration_seconds == 0.0
    assert trace.num_full_blocks.tolist() == [2, 3]


def test_replacing_arrivals_sorts_whole_rows():
    moved = two().replace(arrival_seconds=np.array([9.0, 1.0]))
    assert moved.prompt_tokens.tolist() == [13, 9]
    assert [moved.blocks_of(i).tolist() for i in (0, 1)] == [[5, 6, 7], [5, 6]]
    assert moved.turn.tolist() == [2, 1]


@given(seed=SEEDS, group=st.sampled_from([1, 2, 3, 8]))
def test_coarser_blocks_are_as_if_read_so(talk, seed, group):
    source = talk(seed)
    coarse, truth = source.trace(4).with_block_size(4 * group), source.trace(4 * group)
    assert coarse.block_ids.tolist() == truth.block_ids.tolist()  # both ids say which tokens end there
    assert coarse.block_offsets.tolist() == truth.block_offsets.tolist()


@given(seed=SEEDS, parts=st.sampled_from([2, 4, 8]))
def test_finer_blocks_never_claim_what_is_not_so(talk, seed, parts):
    """Equal ids only where the tokens are equal; and back in coarse blocks nothing is lost."""
    source = talk(seed)
    size = 8 // parts
    coarse = source.trace(8)
    fine, truth = coarse.with_block_size(size), source.trace(size)
    assert fine.block_offsets.tolist() == truth.block_offsets.tolist()
    meaning = {}
    for ours, true in zip(fine.block_ids.tolist(), truth.block_ids.tolist(), strict=True):
        assert meaning.setdefault(ours, true) == true
    rates = [infinite_hit_rate(trace, find_runs(trace)) for trace in (fine, truth)]
    assert rates[0] <= rates[1]
    back = fine.with_block_size(8)
    pairs = set(zip(back.block_ids.tolist(), coarse.block_ids.tolist(), strict=True))
    assert len(pairs) == len(set(coarse.block_ids.tolist()))


def test_parts_of_a_partial_block_are_known_from_the_next_turn(talk):
    """Else each turn would seem to compute the end of the last prompt again."""
    source = talk(3, num_sessions=1, max_turns=12)
    fine, truth = source.trace(8).with_block_size(2), source.trace(2)
    assert len(fine) == 3
    assert infinite_hit_rate(fine, find_runs(fine)) == infinite_hit_rate(truth, find_runs(truth))


def test_block_sizes_that_do_not_fit_are_refused():
    with pytest.raises(TraceError, match="block_size=3 is invalid: expected a divisor or a multiple of 4"):
        two().with_block_size(3)


@given(seed=SEEDS, size=st.sampled_from([2, 4, 16]))
def test_reply_blocks_are_what_the_next_turn_looks_up(talk, seed, size):
    source = talk(seed)
    trace = source.trace(size)
    fresh = set()
    for i in range(len(trace)):
        both = source.prompts[i] + source.replies[i]
        got = trace.reply_blocks(i).tolist()
        assert len(got) == len(both) // size
        assert got[: trace.num_full_blocks[i]] == trace.blocks_of(i).tolist()
        for k, block in enumerate(got):
            if block >= 0:
                assert block == source.ids[both[: (k + 1) * size]]
        unknown = [block for block in got if block < 0]
        assert fresh.isdisjoint(unknown)
        fresh.update(unknown)


@given(seed=SEEDS)
def test_a_conversation_reveals_every_reply_but_the_last(talk, seed):
    """With a block of the session's own in each prompt (here the preamble fills whole blocks)."""
    source = talk(seed, preamble=0)
    trace = source.trace(1)
    last = {session: i for i, session in enumerate(source.sessions)}
    for i, session in enumerate(source.sessions):
        assert (trace.reply_blocks(i) >= 0).all() == (i != last[session])


def test_an_edited_message_does_not_pass_for_the_reply():
    """Request 2 goes back to the end of request 0, after request 1 took it elsewhere."""
    trace = Trace(
        arrival_seconds=np.arange(3.0),
        prompt_tokens=np.array([8, 16, 16]),
        output_tokens=np.array([4, 4, 4]),
        block_ids=np.array([0, 1, 0, 1, 2, 3, 0, 1, 4, 5]),
        block_offsets=np.array([0, 2, 6, 10]),
        block_size=4,
        session=np.zeros(3, dtype=np.int64),
        turn=np.array([1, 2, 2]),
        tenant=np.zeros(3, dtype=np.int64),
    )
    assert trace.successor.tolist() == [1, -1, -1]
    assert trace.reply_blocks(0).tolist() == [0, 1, 2]


def test_a_next_turn_too_short_for_the_reply_reveals_nothing():
    trace = two(output_tokens=np.array([30, 1]))
    assert trace.successor.tolist() == [-1, -1]
    assert (trace.reply_blocks(0)[2:] < 0).all()


@given(seed=SEEDS, preamble=st.sampled_from([0, 8]))
def test_sessions_are_found_from_blocks_alone(talk, seed, preamble):
    source = talk(seed, num_sessions=MAX_FANOUT + 5, preamble=preamble)
    trace = source.trace(1)
    session, turn = derive_sessions(trace.block_ids, trace.block_offsets)
    assert len(set(zip(session.tolist(), source.sessions, strict=True))) == len(set(source.sessions))
    assert turn.tolist() == source.turns


def test_a_system_prompt_does_not_make_one_session_of_all():
    """Its blocks are followed by more than MAX_FANOUT others; a prompt that ends in it stands alone."""
    num = MAX_FANOUT + 1
    chains = [[0, k + 1] for k in range(num)] + [[0], [0], [0, 1, 99]]
    offsets = np.concatenate([[0], np.cumsum([len(chain) for chain in chains])])
    session, turn = derive_sessions(np.array([x for chain in chains for x in chain]), offsets)
    assert session.tolist() == [*range(num), num, num + 1, 0]
    assert turn.tolist() == [1] * (num + 2) + [2]


def test_closed_loop_needs_every_think_time():
    assert not two().closed_loop
    assert two(think_seconds=np.array([np.nan, 2.0])).closed_loop


def test_the_columns_have_their_types():
    trace = two()
    assert {name: getattr(trace, name).dtype for name in COLUMNS} == COLUMNS
