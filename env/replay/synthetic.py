"""Tokens or words with the prefix structure of a trace: equal block, equal content, and no other."""

from functools import lru_cache

import numpy as np

from kvpilot.env.traces.blocks import Ints
from kvpilot.env.traces.trace import Trace

FIRST_TOKEN = 1000  # below are bytes and special tokens in the vocabularies of this field
_PROSE = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea kid body back"
)
WORDS = _PROSE.split()


class SyntheticText:
    """Content of every request of a trace. `vocab_size`: ids are drawn from [FIRST_TOKEN, vocab_size)."""

    def __init__(self, trace: Trace, *, vocab_size: int = 30_000, seed: int = 0) -> None:
        self._trace = trace
        self._low, self._high = min(FIRST_TOKEN, vocab_size // 2), vocab_size
        self._seed = seed
        self._block = lru_cache(maxsize=4096)(self._draw_block)

    def tokens(self, row: int) -> list[int]:
        """Prompt and reply of a request: `prompt_tokens + output_tokens` ids.

        The reply is what the next turn's prompt repeats, where there is one.
        """
        trace = self._trace
        length = int(trace.prompt_tokens[row] + trace.output_tokens[row])
        blocks = [*trace.reply_blocks(row).tolist(), self._tail(row, length)]
        return np.concatenate([self._block(block) for block in blocks])[:length].tolist()

    def prompt(self, row: int) -> list[int]:
        return self.tokens(row)[: int(self._trace.prompt_tokens[row])]

    def prompt_text(self, row: int) -> str:
        """One word per token: about as many tokens in most vocabularies."""
        return " ".join(WORDS[token % len(WORDS)] for token in self.prompt(row))

    def _tail(self, row: int, length: int) -> int:
        """Id of the block behind the last full one: the next turn's, or one that is nobody else's."""
        index, successor = length // self._trace.block_size, int(self._trace.successor[row])
        if successor >= 0 and index < self._trace.num_full_blocks[successor]:
            return int(self._trace.blocks_of(successor)[index])
        return -1 - ((row << 24) + index)

    def _draw_block(self, block: int) -> Ints:
        rng = np.random.default_rng([self._seed, block & 0xFFFFFFFF, (block >> 32) & 0xFFFFFFFF])
        return rng.integers(self._low, self._high, self._trace.block_size)
