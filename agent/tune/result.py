"""What tuning found, as a file that training and evaluation start from."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvpilot.agent.policies.hysteresis import HysteresisConfig
from kvpilot.engine.config import KNOB_NAMES
from kvpilot.engine.errors import ConfigError, InputError
from kvpilot.engine.files import save

FORM = 1  # rises when a reader of older files would misread newer ones


class TunedFormError(InputError, ValueError):
    """A file is not what tuning wrote, or not for this use; the message names file, field and remedy."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """All four knobs, the regime they are best in, and their mean reward there on training data."""

    name: str
    knobs: Mapping[str, float]
    regime: str
    score: float

    def __post_init__(self) -> None:
        if set(self.knobs) != set(KNOB_NAMES):
            raise ConfigError(
                f"knobs={dict(self.knobs)!r} is invalid: expected all of {', '.join(KNOB_NAMES)}"
            )
        bad = [n for n, v in self.knobs.items() if not isinstance(v, int | float) or not math.isfinite(v)]
        if bad or not math.isfinite(self.score):
            raise ConfigError(
                f"setting {self.name!r} is invalid: expected finite {', '.join(bad) or 'score'}"
            )


@dataclass(frozen=True, kw_only=True)
class TunedResult:
    """From training data only. `portfolio[0]` is `static_best`: the start, and the answer if nothing can be learned.

    `hashes` are of the workloads' definitions and traces, by workload; `scores` are mean rewards by workload and
    policy; `provenance` holds version, date, command, number of trials and seconds.
    """

    workload: str  # "standard", or the name of the file
    seeds: Mapping[str, list[int]]  # episodes drawn, by workload
    hashes: Mapping[str, str]
    static_best: Setting
    portfolio: tuple[Setting, ...]
    hysteresis: HysteresisConfig
    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [setting.name for setting in self.portfolio]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"portfolio={names!r} is invalid: expected settings with different names")
        for name in ("seeds", "hashes", "scores", "provenance"):
            if not isinstance(getattr(self, name), Mapping):
                raise ConfigError(f"{name}={getattr(self, name)!r} is invalid: expected an object")

    def write(self, path: Path) -> None:
        """As JSON; whole or not at all."""
        values = {"kvpilot_tuned": FORM, **asdict(self), "hysteresis": self.hysteresis.to_json()}
        save(path, json.dumps(values, indent=2, allow_nan=False) + "\n")

    def check_workloads(self, hashes: Mapping[str, str], source: str) -> None:
        """Raises TunedFormError if `source` was tuned for other workloads than `hashes` names."""
        other = sorted(name for name, value in hashes.items() if self.hashes.get(name) != value)
        if other:
            raise TunedFormError(
                f"{source} was tuned for other workloads: {', '.join(other)} differ or are missing in `hashes` "
                "(of trace, SLO and simulated engine, which another version may change); run `autotune tune` on these "
                "ones, or name the workloads and traces that it was made from"
            )


def read_tuned(path: Path) -> TunedResult:
    """What `write` wrote. Raises TunedFormError."""
    remedy = "make it anew with `autotune tune`"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        form = values.pop("kvpilot_tuned")
        if form != FORM:
            raise TunedFormError(
                f"{path}: kvpilot_tuned={form!r} is of another version: expected {FORM}; {remedy}"
            )
        values["static_best"] = Setting(**values["static_best"])
        values["portfolio"] = tuple(Setting(**setting) for setting in values["portfolio"])
        values["hysteresis"] = HysteresisConfig.from_json(values["hysteresis"])
        return TunedResult(**values)
    except OSError as error:
        raise TunedFormError(f"{path} cannot be read: {error.strerror}; {remedy}") from error
    except UnicodeDecodeError as error:
        raise TunedFormError(f"{path} is not a result of `autotune tune`: not UTF-8; {remedy}") from error
    except KeyError as error:
        raise TunedFormError(
            f"{path} is not a result of `autotune tune`: no field {error}; {remedy}"
        ) from error
    except (TypeError, AttributeError, ConfigError, json.JSONDecodeError) as error:
        raise TunedFormError(f"{path} is not a result of `autotune tune`: {error}; {remedy}") from error
