"""Chained hashes of full pages: equal hash means equal tokens from the start, under the same salt."""

from array import array
from hashlib import blake2b


class TokenChain:
    """Hash of page i of a growing token list, computed when first asked for. `tokens` is read, not copied."""

    def __init__(self, tokens: list[int], page_size: int, salt: str = "") -> None:
        self._tokens = tokens
        self._page_size = page_size
        self._hashes = [blake2b(salt.encode(), digest_size=16).digest()]

    def __call__(self, index: int) -> bytes:
        """16 bytes for tokens [0, (index + 1) * page_size), which must exist."""
        while len(self._hashes) <= index + 1:
            start = (len(self._hashes) - 1) * self._page_size
            page = array("q", self._tokens[start : start + self._page_size])
            assert len(page) == self._page_size, f"page {index} is not full"
            self._hashes.append(blake2b(self._hashes[-1] + page.tobytes(), digest_size=16).digest())
        return self._hashes[index + 1]
