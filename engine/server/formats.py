"""What the OpenAI API answers. Chunks of a stream are spelt out: they are written for every token."""

import json
import time
from collections.abc import Iterable
from typing import Any, Protocol

from kvpilot.engine.async_engine import Delta
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


class _Format:
    def __init__(
        self,
        kind: str,
        request_id: str,
        model: str,
        tokenizer: Tokenizer,
        num_logprobs: int | None,
        with_usage: bool,
    ) -> None:
        self._kind = kind
        self._id = request_id
        self._created = int(time.time())
        self._model = model
        self._tokenizer = tokenizer
        self._num_logprobs = num_logprobs
        self._tail = ',"usage":null}\n\n' if with_usage else "}\n\n"
        self._chunk_kind = kind

    def _head(self, kind: str) -> str:
        fields = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        return json.dumps(fields, separators=(",", ":"))[:-1]

    def usage_chunk(self, request: Request) -> str:
        return f'data: {self._head(self._chunk_kind)},"choices":[],"usage":{json.dumps(usage(request))}}}\n\n'

    def _body(self, choice: dict[str, Any], reason: FinishReason, request: Request) -> dict[str, Any]:
        head = {"id": self._id, "object": self._kind, "created": self._created, "model": self._model}
        return head | {"choices": [{"index": 0, **choice, "finish_reason": reason}], "usage": usage(request)}


class CompletionFormat(_Format):
    def __init__(
        self, request_id: str, model: str, tokenizer: Tokenizer, num_logprobs: int | None, with_usage: bool
    ) -> None:
        super().__init__("text_completion", f"cmpl-{request_id}", model, tokenizer, num_logprobs, with_usage)
        self._prefix = f'data: {self._head(self._chunk_kind)},"choices":[{{"index":0,"text":'
        self._offset = 0  # characters of the tokens so far

    def opening(self) -> str:
        return ""

    def chunk(self, delta: Delta) -> str:
        logprobs = json.dumps(self._logprobs(delta.tokens))
        reason = f'"{delta.finish_reason}"' if delta.finish_reason else "null"
        text = json.dumps(delta.text)
        return f'{self._prefix}{text},"logprobs":{logprobs},"finish_reason":{reason}}}]{self._tail}'

    def body(
        self, text: str, tokens: list[SampledToken], reason: FinishReason, request: Request
    ) -> dict[str, Any]:
        return self._body({"text": text, "logprobs": self._logprobs(tokens)}, reason, request)

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
    def __init__(
        self, request_id: str, model: str, tokenizer: Tokenizer, num_logprobs: int | None, with_usage: bool
    ) -> None:
        super().__init__(
            "chat.completion", f"chatcmpl-{request_id}", model, tokenizer, num_logprobs, with_usage
        )
        self._chunk_kind = "chat.completion.chunk"
        self._prefix = f'data: {self._head(self._chunk_kind)},"choices":[{{"index":0,"delta":'

    def opening(self) -> str:
        delta = '{"role":"assistant","content":""}'
        return f'{self._prefix}{delta},"logprobs":null,"finish_reason":null}}]{self._tail}'

    def chunk(self, delta: Delta) -> str:
        logprobs = json.dumps(self._logprobs(delta.tokens))
        reason = f'"{delta.finish_reason}"' if delta.finish_reason else "null"
        content = f'{{"content":{json.dumps(delta.text)}}}' if delta.text else "{}"
        return f'{self._prefix}{content},"logprobs":{logprobs},"finish_reason":{reason}}}]{self._tail}'

    def body(
        self, text: str, tokens: list[SampledToken], reason: FinishReason, request: Request
    ) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._body({"message": message, "logprobs": self._logprobs(tokens)}, reason, request)

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
