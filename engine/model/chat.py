"""Renders a checkpoint's Jinja chat template. Templates are other people's code: immutable sandbox only."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvpilot.engine.errors import ModelError, RequestError


class ChatTemplate:
    """`special_tokens` (bos_token, eos_token, ...) are visible to the template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ModelError(f"the checkpoint's chat template is broken: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """RequestError (field `messages`) if the template refuses the messages."""
        variables = {"add_generation_prompt": True, **self._special_tokens, **variables}
        try:
            return self._template.render(messages=messages, **variables)
        # A template is arbitrary code over what the client sent: besides its own errors it can only fail
        # with those of Python's operators, and each of them means that it does not accept the messages.
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            message = f"the model's chat template refuses the messages: {error}"
            raise RequestError(message, "messages") from error


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)
