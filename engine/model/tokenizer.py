"""Text to tokens and back, and the chat template, as the checkpoint brings them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from kvpilot.engine.errors import ModelError, RequestError
from kvpilot.engine.model.chat import ChatTemplate

# Control tokens that end a turn in the chat formats of the Llama family.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "</s>")
SPACE_MARK = "\u2581"  # SentencePiece's visible space


class Tokenizer:
    """A `tokenizers.Tokenizer` with the ids and the chat template that belong to it.

    Decoding works on bytes per token, so that text can be streamed: `decode(a + b)` is always the text of
    the bytes of a and b, whatever the split. Special tokens have no text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Sequence[int] = (),
        bos_id: int | None = None,
        add_bos: bool = False,
        chat_template: str | None = None,
    ) -> None:
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        self._bytes_of_char, self._has_space_mark = _decoding(backend)
        self._add_bos = add_bos
        self.bos_id = bos_id
        ends = (backend.token_to_id(text) for text in END_OF_TURN)
        self.eos_ids = frozenset(eos_ids) | {i for i in ends if i in self._added and self._added[i].special}
        self._template = None
        if chat_template:
            named = {"bos_token": bos_id, "eos_token": next(iter(eos_ids), None)}
            texts = {name: backend.id_to_token(i) for name, i in named.items() if i is not None}
            self._template = ChatTemplate(chat_template, {name: text or "" for name, text in texts.items()})

    @property
    def vocab_size(self) -> int:
        """Largest token id + 1."""
        return max(self._backend.get_vocab().values()) + 1

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Token ids; special tokens spelt out in `text` become their ids. `add_special` puts the
        beginning-of-text token in front where the checkpoint asks for it."""
        try:
            text.encode()
        except UnicodeEncodeError as error:  # a lone surrogate, which JSON can carry
            raise RequestError(f"the text is not valid Unicode: {error.reason}") from error
        ids = self._backend.encode(text, add_special_tokens=False).ids
        return [self.bos_id, *ids] if add_special and self._add_bos and self.bos_id is not None else ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the tokens, without the space that SentencePiece puts before the first word."""
        text = b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._has_space_mark else text

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of one token, maybe part of a character; empty for special and unknown ids."""
        added = self._added.get(token_id)
        if added is not None:
            return b"" if added.special else added.content.encode()
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._bytes_of_char is not None:
            return b"".join(self._bytes_of_char.get(char) or char.encode() for char in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace(SPACE_MARK, " ").encode()

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt of a chat; RequestError if the template refuses it or the checkpoint has none."""
        if self._template is None:
            raise RequestError("this model has no chat template: use plain completions", "messages")
        return self._template.render(messages, **variables)


def _decoding(backend: tokenizers.Tokenizer) -> tuple[dict[str, bytes] | None, bool]:
    """(byte of each visible character or None if not byte-level, spaces are marked)."""
    if backend.decoder is None:
        raise ModelError("the tokenizer has no decoder: expected byte-level BPE or SentencePiece with bytes")
    state = json.loads(backend.decoder.__getstate__())
    kinds = {part["type"] for part in state.get("decoders", [state])}
    if "ByteLevel" in kinds:
        return {char: bytes([byte]) for byte, char in byte_characters().items()}, False
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return None, True
    raise ModelError(
        f"the tokenizer's decoder {sorted(kinds)} is not supported: expected ByteLevel or ByteFallback"
    )


def byte_characters() -> dict[int, str]:
    """GPT-2's printable stand-in for every byte."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
