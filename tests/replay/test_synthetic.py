"""Synthetic content has the prefix structure of the trace, and nothing else in common."""

from kvpilot.env.replay.synthetic import FIRST_TOKEN, WORDS, SyntheticText


def common(a, b) -> int:
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_prompts_share_the_blocks_that_the_trace_says(chats):
    text = SyntheticText(chats)
    for one in range(0, len(chats), 7):
        for other in range(one + 1, len(chats), 5):
            if chats.session[one] == chats.session[other]:
                continue
            blocks = common(chats.blocks_of(one).tolist(), chats.blocks_of(other).tolist())
            tokens = common(text.prompt(one), text.prompt(other))
            assert blocks * 8 <= tokens < blocks * 8 + 3


def test_the_next_turn_repeats_prompt_and_reply(chats):
    text = SyntheticText(chats)
    pairs = [(row, int(chats.successor[row])) for row in range(len(chats)) if chats.successor[row] >= 0]
    assert len(pairs) > 20
    for row, successor in pairs:
        full = len(text.tokens(row)) // 8 * 8
        assert text.prompt(successor)[:full] == text.tokens(row)[:full]


def test_lengths_and_ids_are_in_bounds_and_do_not_depend_on_the_order_of_asking(chats):
    text, other = SyntheticText(chats, vocab_size=5000), SyntheticText(chats, vocab_size=5000)
    backwards = {row: other.tokens(row) for row in reversed(range(len(chats)))}
    for row in range(len(chats)):
        tokens = text.tokens(row)
        assert tokens == backwards[row]
        assert len(tokens) == chats.prompt_tokens[row] + chats.output_tokens[row]
        assert min(tokens) >= FIRST_TOKEN
        assert max(tokens) < 5000


def test_words_follow_the_same_structure(chats):
    text = SyntheticText(chats)
    assert len(text.prompt_text(0).split()) == chats.prompt_tokens[0]
    assert set(text.prompt_text(0).split()) <= set(WORDS)
