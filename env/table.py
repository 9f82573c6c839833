"""What a user writes as TOML or JSON, read into frozen dataclasses: errors name file, field, value and a remedy."""

import json
import math
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from kvpilot.engine.errors import ConfigError, KVPilotError

Config = TypeVar("Config")


def read_table(path: Path) -> dict[str, Any]:
    """Of a TOML file, or a JSON file by its name. Raises ConfigError."""
    form = "JSON" if path.suffix == ".json" else "TOML"
    try:
        text = path.read_text(encoding="utf-8")
        table = json.loads(text) if form == "JSON" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: it is not {form}: {error}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{path} is malformed: expected a table")
    return table


class _MismatchError(Exception):
    pass


@dataclass(frozen=True, kw_only=True)
class TableReader:
    """By the types of the fields: numbers, texts, paths, tuples, mappings, other dataclasses, and unions of them."""

    folder: Path = Path()  # that paths are relative to
    finite: bool = False  # whether numbers have to be

    def build(
        self, kind: type[Config], table: Mapping[str, Any], place: str, base: Config | None = None
    ) -> Config:
        """Fields that `table` leaves out are as in `base`. Raises ConfigError that begins with `place`."""
        known = {field.name: field for field in fields(kind)}  # pyright: ignore[reportArgumentType]
        hints = get_type_hints(kind)
        for name, value in table.items():
            if name not in known:
                raise ConfigError(f"{place}: {name}={value!r} is invalid: expected one of {', '.join(known)}")
        missing = [name for name, field in known.items() if name not in table and _is_required(field)]
        if missing and base is None:
            raise ConfigError(
                f"{place}: {missing[0]}=None is invalid: expected {self._words(hints[missing[0]])}"
            )
        values = {
            name: self._field(hints[name], name, value, place, getattr(base, name, None))
            for name, value in table.items()
        }
        try:
            return kind(**values) if base is None else replace(base, **values)  # pyright: ignore
        except KVPilotError as error:
            raise ConfigError(f"{place}: {error}") from error

    def _field(self, kind: Any, name: str, value: Any, place: str, current: Any) -> Any:
        try:
            return self._read(kind, value, f"{place}, {name}", current)
        except _MismatchError:
            raise ConfigError(f"{place}: {name}={value!r} is invalid: expected {self._words(kind)}") from None

    def _read(self, kind: Any, value: Any, place: str, current: Any = None) -> Any:
        origin, parts = get_origin(kind), get_args(kind)
        if origin in (Union, UnionType):
            for part in parts:
                with suppress(_MismatchError):
                    return self._read(part, value, place, current)
        elif is_dataclass(kind) and isinstance(value, Mapping):
            return self.build(kind, value, place, current)  # pyright: ignore[reportArgumentType]
        elif origin is Mapping and isinstance(value, Mapping):
            return {name: self._read(parts[1], one, f"{place} {name}") for name, one in value.items()}
        elif origin is tuple and isinstance(value, list | tuple):
            of = parts[:1] * len(value) if parts[-1] is ... else parts
            if len(of) == len(value):
                return tuple(self._read(part, one, place) for part, one in zip(of, value, strict=True))
        elif kind is Path and isinstance(value, str):
            return self.folder / value
        elif kind is float and type(value) in (
            int,
            float,
        ):  # a whole number stays one: hashes are of what is written
            if math.isfinite(value) or (not self.finite and not math.isnan(value)):
                return value
        elif type(value) is kind or (kind is NoneType and value is None):
            return value
        raise _MismatchError

    def _words(self, kind: Any) -> str:
        origin, parts = get_origin(kind), get_args(kind)
        if origin in (Union, UnionType):
            return " or ".join(self._words(part) for part in parts if part is not NoneType)
        if is_dataclass(kind):
            return "a table"
        if origin is Mapping:
            return f"a table of {self._words(parts[1])}"
        if origin is tuple:
            number = "" if parts[-1] is ... else f"{len(parts)} "
            return f"a list of {number}{parts[0].__name__}"
        if kind is Path:
            return "a path"
        return f"a finite {kind.__name__}" if self.finite else kind.__name__


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING
