"""The public API: completions, chat completions, models, health, metrics."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar, cast

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from kvpilot.engine.async_engine import AsyncEngine
from kvpilot.engine.errors import EngineClosedError, RequestError
from kvpilot.engine.model.tokenizer import Tokenizer
from kvpilot.engine.request import SamplingParams
from kvpilot.engine.server.formats import AnswerFormat, ChatFormat, CompletionFormat
from kvpilot.engine.server.http import DRAIN_RETRY_SECONDS, ModelNotFoundError, parse_object, read_body
from kvpilot.engine.server.responses import EventStream, whole_answer
from kvpilot.engine.server.schemas import ChatBody, CompletionBody, GenerationFields, parse

COMPLETION_MAX_TOKENS = 16  # OpenAI's defaults
TEMPERATURE = 1.0
SPECIAL_TOKEN_BYTES = 64  # more than any special token is spelt with
SHORT_BODY_BYTES = 4096  # read and tokenized at once; longer ones on a thread, so that streams go on

T = TypeVar("T")
MetricsSource = Callable[[], tuple[bytes, str]]  # body and content type of /metrics


class OpenAIService:
    """Checks requests against the model and runs them. `metrics` renders the exposition text."""

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: Tokenizer,
        model_name: str,
        metrics: MetricsSource,
        *,
        max_body_bytes: int,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._created = int(time.time())
        self._vocab_size = tokenizer.vocab_size
        self._max_model_len = engine.engine.max_model_len
        longest = max(len(tokenizer.token_bytes(token)) for token in range(self._vocab_size))
        self._max_token_bytes = max(longest, SPECIAL_TOKEN_BYTES)

    def router(self) -> APIRouter:
        router = APIRouter()
        for path, handler in (("/v1/completions", self._completions), ("/v1/chat/completions", self._chat)):
            router.add_api_route(path, handler, methods=["POST"])
        for path, handler in (
            ("/v1/models", self._models),
            ("/v1/models/{model:path}", self._model),
            ("/health", self._health),
            ("/metrics", self._render_metrics),
        ):
            router.add_api_route(path, handler, methods=["GET"])
        return router

    async def _completions(self, request: Request) -> Response:
        body, tokens = await _compute(self._read_completion, await self._read(request))
        sampling = self._sampling(
            body, tokens, "prompt", body.max_tokens or COMPLETION_MAX_TOKENS, body.logprobs
        )
        return await self._run(request, body, tokens, sampling, CompletionFormat)

    async def _chat(self, request: Request) -> Response:
        body, tokens = await _compute(self._read_chat, await self._read(request))
        num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        limit = body.max_completion_tokens or body.max_tokens
        sampling = self._sampling(body, tokens, "messages", limit, num_logprobs)
        return await self._run(request, body, tokens, sampling, ChatFormat)

    def _read_completion(self, raw: bytes) -> tuple[CompletionBody, list[int]]:
        body = parse(CompletionBody, parse_object(raw))
        self._check_model(body.model)
        prompt = body.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return body, self._encode(prompt, "prompt", add_special=True)
        return body, cast(list[int], prompt)

    def _read_chat(self, raw: bytes) -> tuple[ChatBody, list[int]]:
        body = parse(ChatBody, parse_object(raw))
        self._check_model(body.model)
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs=true", "top_logprobs")
        messages = [message.for_template() for message in body.messages]
        return body, self._encode(self._tokenizer.render_chat(messages), "messages")

    def _encode(self, text: str, field: str, *, add_special: bool = False) -> list[int]:
        """Megabytes take the tokenizer seconds: a text that cannot fit is refused by its size."""
        least = len(text.encode()) // self._max_token_bytes
        if least > self._max_model_len:
            limit = self._max_model_len - 1
            raise RequestError(f"{field} has more than {least} tokens: the limit is {limit}", field)
        return self._tokenizer.encode(text, add_special=add_special)

    async def _read(self, request: Request) -> bytes:
        if self._engine.state != "ok":  # before the work of reading a prompt
            raise EngineClosedError(f"the server takes no new requests: it is {self._engine.state}")
        return await read_body(request, self._max_body_bytes)

    def _check_model(self, model: str) -> None:
        if model != self._model_name:
            raise ModelNotFoundError(
                f"model {model[:80]!r} is not served here: use {self._model_name!r}", "model"
            )

    def _sampling(
        self,
        body: GenerationFields,
        prompt: list[int],
        field: str,
        limit: int | None,
        num_logprobs: int | None,
    ) -> SamplingParams:
        """Checks the prompt too. The output may fill the rest of the context, and ends there."""
        if not prompt:
            raise RequestError(f"{field} has no tokens", field)
        if (largest := max(prompt)) >= self._vocab_size:
            raise RequestError(
                f"token {largest} is not in the vocabulary of {self._vocab_size} tokens", field
            )
        room = self._max_model_len - len(prompt)
        if room < 1:
            message = f"{field} has {len(prompt)} tokens: the limit is {self._max_model_len - 1}"
            raise RequestError(f"{message} (a context of {self._max_model_len}, one for the output)", field)
        if limit is not None and limit > self._max_model_len:
            bounds = f"expected at most the context of {self._max_model_len} tokens"
            raise RequestError(f"max_tokens={limit} is invalid: {bounds}", "max_tokens")
        ends = frozenset() if body.ignore_eos else self._tokenizer.eos_ids
        return SamplingParams(
            max_tokens=min(limit or room, room),
            temperature=TEMPERATURE if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=body.top_k or 0,
            seed=body.seed,
            logprobs=num_logprobs,
            stop_token_ids=ends.union(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
        )

    async def _run(
        self,
        request: Request,
        body: GenerationFields,
        prompt: list[int],
        sampling: SamplingParams,
        kind: type[CompletionFormat] | type[ChatFormat],
    ) -> Response:
        generation = await self._engine.generate(
            prompt,
            sampling,
            cache_salt=body.cache_salt or "",
            stop=body.stop_strings,
            traceparent=request.headers.get("traceparent"),
            max_kv_level=body.max_kv_level,
        )
        with_usage = bool(body.stream and body.include_usage)
        form: AnswerFormat = kind(
            generation.request_id, self._model_name, self._tokenizer, sampling.logprobs, with_usage
        )
        if body.stream:
            return EventStream(generation, form, include_usage=with_usage)
        return await whole_answer(request.receive, generation, form)

    async def _models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, model: str) -> Response:
        self._check_model(model)
        return JSONResponse(self._card())

    def _card(self) -> dict[str, object]:
        about = {"created": self._created, "owned_by": "kvpilot", "max_model_len": self._max_model_len}
        return {"id": self._model_name, "object": "model", **about}

    async def _health(self) -> Response:
        state = self._engine.state
        if state == "ok":
            return JSONResponse({"status": state})
        return JSONResponse({"status": state}, 503, {"Retry-After": str(DRAIN_RETRY_SECONDS)})

    async def _render_metrics(self) -> Response:
        body, content_type = self._metrics()
        return Response(body, media_type=content_type)


async def _compute(function: Callable[[bytes], T], raw: bytes) -> T:
    return function(raw) if len(raw) <= SHORT_BODY_BYTES else await asyncio.to_thread(function, raw)
