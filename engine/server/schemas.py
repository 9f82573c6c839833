"""The request bodies of the OpenAI API, and which of its many fields this server takes.

Fields that would change the output and are not implemented are refused unless they have their neutral value;
fields that cannot change it are ignored; names that OpenAI does not know are refused.
"""

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvpilot.engine.errors import RequestError

IGNORED_FIELDS = frozenset(
    {
        *("user", "safety_identifier", "metadata", "store", "service_tier"),
        *("parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention"),
    }
)
NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
MAX_SHOWN_CHARS = 80
MAX_STOP_CHARS = 1000

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# fail_fast: a body of a million bad entries would otherwise cost a million error reports.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis: we never pad


class GenerationFields(_Strict):
    """What completions and chat completions have in common; None stands for the default."""

    model: str
    max_tokens: Count | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = Field(
        None, description=f"a string of 1 to {MAX_STOP_CHARS} characters or a list of at most 16 of them"
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Not OpenAI's, but what the engines of this field call them.
    top_k: int | None = Field(None, ge=0, lt=2**31)
    cache_salt: Annotated[str, Field(max_length=1000)] | None = None
    ignore_eos: bool | None = None
    max_kv_level: int | None = Field(
        None,
        ge=0,
        lt=2**31,
        description="an integer from 0, the coarsest level of the engine's ladder that the request's KV pages may "
        "have (0: full precision), or leave it out for no limit of its own",
    )
    stop_token_ids: Annotated[TokenIds, Field(max_length=64)] | None = None

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionBody(GenerationFields):
    prompt: (
        str | TokenIds | Annotated[list[str | TokenIds], Field(min_length=1, max_length=1, fail_fast=True)]
    ) = Field(description="a string, a list of token ids, or a list with one of these")
    logprobs: int | None = Field(None, ge=0, le=20)


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None  # None: an answer without text
    name: str | None = None
    # Clients send an answer back as they got it.
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _check_content(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise ValueError("only an answer of the assistant may be without content")
        return self

    def for_template(self) -> dict[str, str]:
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return {"role": role, "content": self.content}
        return {"role": role, "content": "".join(part.text for part in self.content or ())}


class ChatBody(GenerationFields):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)


Body = TypeVar("Body", bound=GenerationFields)


def parse(kind: type[Body], fields: dict[str, Any]) -> Body:
    """RequestError names the first field that is unknown, unsupported or out of bounds."""
    supported = {}
    for name, value in fields.items():
        if name in NEUTRAL_VALUES:
            _check_neutral(name, value)
        elif name not in IGNORED_FIELDS:
            supported[name] = value
    try:
        return kind.model_validate(supported)
    except ValidationError as error:
        raise _explain(error, kind) from None


def _check_neutral(name: str, value: object) -> None:
    allowed = NEUTRAL_VALUES[name]
    if value is None or any(type(value) is type(other) and value == other for other in allowed):
        return
    remedy = " or ".join(["leave it out", *(f"set it to {json.dumps(other)}" for other in allowed[:1])])
    raise RequestError(f"{name}={_show(value)} is not supported: {remedy}", name)


def _explain(error: ValidationError, kind: type[BaseModel]) -> RequestError:
    """The first error; an unknown field before all, since its name is what the client got wrong."""
    details = error.errors(include_url=False, include_context=False)
    first = next((d for d in details if d["type"] == "extra_forbidden"), details[0])
    # pydantic adds the tried branch of a union ("str", "list[...]") to the path: not part of the field's name
    path = [part for part in first["loc"] if isinstance(part, int) or (part.isidentifier() and part != "str")]
    param = ".".join(map(str, path))
    if first["type"] == "extra_forbidden":
        return RequestError(f"unknown field {param!r}", param)
    if first["type"] == "missing":
        return RequestError(f"field {param!r} is missing", param)
    field = kind.model_fields.get(param)
    expected = f"expected {field.description}" if field and field.description else first["msg"]
    return RequestError(f"{param}={_show(first['input'])} is invalid: {expected}", param)


def _show(value: object) -> str:
    """At most MAX_SHOWN_CHARS of a client's value, safe to encode."""
    if isinstance(value, str | list | dict) and len(value) > MAX_SHOWN_CHARS:
        return f"<{type(value).__name__} of length {len(value)}>"
    shown = ascii(value)
    return shown if len(shown) <= MAX_SHOWN_CHARS else shown[:MAX_SHOWN_CHARS] + "..."
