"""What a replay gives, whatever it ran against: requests, windows of time, figures, and where they come from."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvpilot.engine.errors import ConfigError, InputError
from kvpilot.engine.files import save
from kvpilot.env.slo import Slo

FORM = 1  # rises when a reader of older files would misread newer ones

DONE, REFUSED, FAILED, CUT_OFF = "done", "refused", "failed", "cut off"

REQUEST_COLUMNS = (
    "row",  # in the trace
    "session",
    "turn",
    "arrival_seconds",
    "queue_seconds",  # None where the server does not say
    "ttft_seconds",
    "inter_token_seconds",  # mean over the answer
    "e2e_seconds",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "status",
)


class ReplayFormError(InputError, ValueError):
    """A file is not a replay's result; the message names file and field."""


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """`requests` and `windows` are columns of equal length; absent values are None.

    `windows` rows are statistics between two snapshots (see `window_row`). `summary` is computed from both.
    """

    target: str  # "sim" or the server's URL
    trace: dict[str, Any]  # name, provenance, num_requests, block_size
    config: dict[str, Any]  # engine envelope and knobs, profile
    slo: Slo
    requests: dict[str, list[Any]]
    windows: dict[str, list[Any]]
    summary: dict[str, Any]
    provenance: dict[str, Any] = field(default_factory=dict)  # version, date, command, seconds it took
    is_partial: bool = False  # stopped before the end

    def write(self, path: Path) -> None:
        """As JSON; whole or not at all."""
        values = {"kvpilot_replay": FORM, **vars(self), "slo": vars(self.slo)}
        save(path, json.dumps(_clean(values), allow_nan=False) + "\n")


def read_result(path: Path) -> ReplayResult:
    """What `write` wrote. Raises ReplayFormError."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        form = values.pop("kvpilot_replay")
        if form != FORM:
            raise ReplayFormError(f"{path}: kvpilot_replay={form!r} is invalid: expected {FORM}")
        values["slo"] = Slo(**values["slo"])
        result = ReplayResult(**values)
    except OSError as error:
        raise ReplayFormError(f"{path} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, AttributeError, ConfigError, json.JSONDecodeError) as error:
        raise ReplayFormError(f"{path} is not the result of a replay: {error}") from error
    _check_tables(path, result)
    missing = [name for name in REQUEST_COLUMNS if name not in result.requests]
    if missing or len({len(column) for column in result.requests.values()}) != 1:
        raise ReplayFormError(
            f"{path}: field requests is malformed: missing columns {missing}, or unequal lengths"
        )
    return result


def _check_tables(path: Path, result: ReplayResult) -> None:
    """What every reader relies on. Raises ReplayFormError."""
    for name in ("trace", "config", "requests", "windows", "summary", "provenance"):
        if not isinstance(getattr(result, name), dict):
            raise ReplayFormError(f"{path}: field {name} is malformed: expected an object")
    summary = result.summary
    shapes = {"requests": int, "seconds": int | float, "status": dict}
    wrong = [name for name, shape in shapes.items() if not isinstance(summary.get(name), shape)]
    if wrong:
        raise ReplayFormError(f"{path}: field summary is malformed: it lacks {', '.join(wrong)}")
    if not all(isinstance(column, list) for column in result.requests.values()):
        raise ReplayFormError(f"{path}: field requests is malformed: expected columns")


def _clean(value: Any) -> Any:
    """JSON has no NaN; floats with more digits than anything here is known to make files five times as large."""
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _clean(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(entry) for entry in value]
    return value
