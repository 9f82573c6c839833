"""Streaming: whatever the split into tokens, the same text, never half a character or part of a stop string."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot.engine.text import TextStream


class Pieces:
    """A tokenizer whose token i is the i-th piece."""

    def __init__(self, pieces):
        self.pieces = pieces

    def token_bytes(self, token_id):
        return self.pieces[token_id]


def cut(data, cuts):
    edges = [0, *sorted({c % (len(data) + 1) for c in cuts}), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def stream(pieces, stop=()):
    text = TextStream(Pieces(pieces), stop)
    shown = [text.push(i) for i in range(len(pieces))]
    return text, [*shown, text.flush()]


TEXT = st.text(alphabet="ab\u00e9\u4f60\U0001f600 ", max_size=30)


@given(TEXT, st.lists(st.integers(0, 200)))
def test_any_split_gives_the_text_and_whole_characters(text, cuts):
    _, shown = stream(cut(text.encode(), cuts))
    assert "".join(shown) == text


@given(
    TEXT,
    st.lists(st.integers(0, 200)),
    st.lists(st.text(alphabet="ab\u00e9 ", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_end_the_text_where_the_first_is_complete(text, cuts, stop):
    state, shown = stream(cut(text.encode(), cuts), stop)
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    assert state.stopped == bool(ends)
    assert "".join(shown) == (text[: min(ends)[1]] if ends else text)


@given(TEXT, st.lists(st.text(alphabet="ab ", min_size=1, max_size=4), min_size=1, max_size=3))
def test_only_a_possible_stop_string_is_held_back(text, stop):
    characters = [char.encode() for char in text]
    state = TextStream(Pieces(characters), stop)
    shown = ""
    for i in range(len(characters)):
        shown += state.push(i)
        if state.stopped:
            return
        held = text[len(shown) : i + 1]
        assert text[: i + 1] == shown + held
        assert not held or any(s.startswith(held) for s in stop)


def test_unfinished_character_becomes_a_replacement_at_the_end():
    _, shown = stream([b"a\xf0\x9f", b"\x98"])
    assert shown == ["a", "", "\ufffd"]


def test_invalid_bytes_do_not_block_the_stream():
    _, shown = stream([b"\xff", b"ok"])
    assert "".join(shown) == "\ufffdok"


def test_nothing_comes_after_a_stop():
    text = TextStream(Pieces([b"a END b", b"more"]), ["END"])
    assert text.push(0) == "a "
    assert text.stopped
    assert text.push(1) == ""
    assert text.flush() == ""


@pytest.mark.parametrize("stop", [[], [""]])
def test_no_stop_string_holds_nothing_back(stop):
    text = TextStream(Pieces([b"a"]), stop)
    assert text.push(0) == "a"
    assert not text.stopped
