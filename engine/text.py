"""From tokens to text as they come: no half characters, no text that may yet turn out to be a stop string."""

import codecs
from collections.abc import Sequence
from typing import Protocol


class TokenBytes(Protocol):
    """The part of a tokenizer that streaming needs."""

    def token_bytes(self, token_id: int) -> bytes: ...


class TextStream:
    """The text of one answer. After `stopped` turns true nothing more comes out."""

    def __init__(self, tokenizer: TokenBytes, stop: Sequence[str] = ()) -> None:
        self.stopped = False  # a stop string was found; it is not part of the text
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = [text for text in stop if text]
        self._held = ""  # the longest end of the text so far that a stop string begins with

    def push(self, token_id: int) -> str:
        """The new text that is safe to show, maybe empty."""
        return self._emit(self._decoder.decode(self._tokenizer.token_bytes(token_id)), final=False)

    def flush(self) -> str:
        """The rest, when the answer ends: what was held back, and U+FFFD for an unfinished character."""
        return self._emit(self._decoder.decode(b"", final=True), final=True)

    def _emit(self, new: str, final: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:  # the one that was complete first, so that the cut into tokens does not matter
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = 0 if final else max((_overlap(text, stop) for stop in self._stop), default=0)
        safe = len(text) - keep
        self._held = text[safe:]
        return text[:safe]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
