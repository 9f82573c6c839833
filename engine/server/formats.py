"""What the OpenAI API answers. Chunks of a stream are spelt out: they are written for every token."""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, Protocol

from kvpilot.engine.generation import Delta
from kvpilot.engine.model.tokenizer import Tokenizer
from kvpilot.engine.request import FinishReason, Request, SampledToken

LOWEST_LOGPROB = -9999.0  # JSON has no -inf


class AnswerFormat(Protocol):
    """One kind of answer; one object per request."""

    def opening(self) -> str:
        """Events before the first token."""
        ...

    def chunk(self, delta: Delta) -> str: ...

    def usage_chunk(self, request: Request) -> str: ...

    def body(
        self, text: str, tokens: list[SampledToken], reason: FinishReason, request: Request
    ) -> dict[str, Any]:
        """The whole answer, where it is not streamed."""
        ...


def usage(request: Request) -> dict[str, Any]:
    return {
        "prompt_tokens": request.num_prompt_tokens,
        "completion_tokens": request.num_output_tokens,
        "total_tokens": request.num_tokens,
        "prompt_tokens_details": {"cached_tokens": request.num_cached},
    }


class _Format(ABC):
    """What both kinds have in common; `opening_of_choice` is what the choice of a chunk begins with."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    id_prefix: ClassVar[str]
    opening_of_choice: ClassVar[str]

    def __init__(
        self, request_id: str, model: str, tokenizer: Tokenizer, num_logprobs: int | None, with_usage: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._num_logprobs = num_logprobs
        self._about = {
            "id": self.id_prefix + request_id,
            "object": self.kind,
            "created": int(time.time()),
            "model": model,
        }
        head = json.dumps(self._about | {"object": self.chunk_kind}, separators=(",", ":"))[:-1]
        self._head = f'data: {head},"choices":['
        self._prefix = f'{self._head}{{"index":0,{self.opening_of_choice}'
        self._tail = ',"usage":null}\n\n' if with_usage else "}\n\n"

    def chunk(self, delta: Delta) -> str:
        logprobs = json.dumps(self._logprobs(delta.tokens))
        reason = f'"{delta.finish_reason}"' if delta.finish_reason else "null"
        return self._chunk(self._content(delta.text), logprobs, reason)

    def usage_chunk(self, request: Request) -> str:
        return f'{self._head}],"usage":{json.dumps(usage(request))}}}\n\n'

    def _chunk(self, content: str, logprobs: str, reason: str) -> str:
        return f'{self._prefix}{content},"logprobs":{logprobs},"finish_reason":{reason}}}]{self._tail}'

    def _body(self, choice: dict[str, Any], reason: FinishReason, request: Request) -> dict[str, Any]:
        choices = [{"index": 0, **choice, "finish_reason": reason}]
        return self._about | {"choices": choices, "usage": usage(request)}

    @abstractmethod
    def _content(self, text: str) -> str:
        """The text of a chunk in JSON."""

    @abstractmethod
    def _logprobs(self, tokens: Iterable[SampledToken]) -> dict[str, Any] | None: ...


class CompletionFormat(_Format):
    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl-"
    opening_of_choice = '"text":'

    _offset = 0  # characters of the tokens so far

    def opening(self) -> str:
        return ""

    def body(
        self, text: str, tokens: list[SampledToken], reason: FinishReason, request: Request
    ) -> dict[str, Any]:
        return self._body({"text": text, "logprobs": self._logprobs(tokens)}, reason, request)

    def _content(self, text: str) -> str:
        return json.dumps(text)

    def _logprobs(self, tokens: Iterable[SampledToken]) -> dict[str, list[Any]] | None:
        if self._num_logprobs is None:
            return None
        form: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token, logprobs in tokens:
            assert logprobs is not None
            text, chosen = _text(self._tokenizer, token), _finite(logprobs.chosen)
            top = logprobs.top[: self._num_logprobs]
            form["tokens"].append(text)
            form["token_logprobs"].append(chosen)
            form["top_logprobs"].append(
                {_text(self._tokenizer, i): _finite(p) for i, p in top} | {text: chosen}
            )
            form["text_offset"].append(self._offset)
            self._offset += len(text)
        return form


class ChatFormat(_Format):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl-"
    opening_of_choice = '"delta":'

    def opening(self) -> str:
        return self._chunk('{"role":"assistant","content":""}', "null", "null")

    def body(
        self, text: str, tokens: list[SampledToken], reason: FinishReason, request: Request
    ) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._body({"message": message, "logprobs": self._logprobs(tokens)}, reason, request)

    def _content(self, text: str) -> str:
        return f'{{"content":{json.dumps(text)}}}' if text else "{}"

    def _logprobs(self, tokens: Iterable[SampledToken]) -> dict[str, Any] | None:
        if self._num_logprobs is None:
            return None
        content = []
        for token, logprobs in tokens:
            assert logprobs is not None
            top = [self._entry(i, p) for i, p in logprobs.top[: self._num_logprobs]]
            content.append(self._entry(token, logprobs.chosen) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.token_bytes(token).decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
