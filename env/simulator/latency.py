"""How long a step takes: non-negative weights on what it does, fitted to steps of a real engine."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.resources import files
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from kvpilot.engine.config import EngineConfig, Knobs
from kvpilot.engine.errors import ConfigError
from kvpilot.engine.kv.formats import PageShape
from kvpilot.engine.kv.quality import quality_loss as measured_loss
from kvpilot.env.simulator.step_cost import Ramp, StepCost


@dataclass(frozen=True, kw_only=True)
class ProfiledModel:
    """The model that a profile belongs to: what sizes pages and bounds requests."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_len: int  # tokens of prompt + output

    def page_shape(self, page_size: int) -> PageShape:
        return PageShape(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=page_size,
        )


@dataclass(frozen=True, kw_only=True)
class LatencyProfile:
    """Seconds per unit of each feature (see StepFeatures), and where they come from.

    `fixed` is the cost of a step that does nothing, `sequence` of each decoding request, `kv_byte[codec]` of a
    byte of pages read by decoding ones, `convert[codec]` of a page re-encoded to it. Matrix products do not cost
    the same per row from 1 row to 1000: `rows` and `sampled` are ramps over the tokens of a step and over those
    that get logits. `engine` holds fields of EngineConfig, and `max_batch`: the ones measured with, and defaults.
    """

    name: str
    fixed: float
    prefill_token: float
    prefill_pair: float
    sequence: float
    kv_byte: Mapping[str, float]
    convert: Mapping[str, float]
    moved_byte: float
    origin: Mapping[str, object]  # machine, model, versions, date, command, error; or why not calibrated
    prefill_context: float = 0.0
    rows: Ramp = ()
    sampled: Ramp = ()
    model: ProfiledModel | None = None
    engine: Mapping[str, int] = field(default_factory=dict)
    quality_loss: Mapping[str, float] = field(default_factory=dict)  # mean KL by codec, see `best_known_loss`

    @property
    def needed_model(self) -> ProfiledModel:
        """ConfigError if the profile names none."""
        if self.model is None:
            raise ConfigError(f"profile {self.name!r} names no model: field model is needed to size pages")
        return self.model

    @property
    def best_known_loss(self) -> dict[str, float]:
        """Mean KL (nats per token) by codec: as measured on the model, else what the profile says."""
        return dict(measured_loss(self.needed_model.name) or self.quality_loss)

    def step_cost(self, ladder: tuple[str, ...]) -> StepCost:
        """The weights for pages on this ladder."""
        return StepCost(
            [self.fixed, self.prefill_token, self.prefill_pair, self.prefill_context, self.sequence],
            self.moved_byte,
            kv_byte=[self.kv_byte[codec] for codec in ladder],
            convert=[0.0, *(self.convert[codec] for codec in ladder[1:])],
            rows=self.rows,
            sampled=self.sampled,
        )

    def for_page_size(self, page_size: int) -> "LatencyProfile":
        """The same with `convert` for pages of another size than `engine["page_size"]`: it grows with the bytes."""
        measured = self.engine.get("page_size", page_size)
        convert = {codec: seconds * page_size / measured for codec, seconds in self.convert.items()}
        return replace(self, convert=convert, engine={**self.engine, "page_size": page_size})

    def engine_config(self, **changes: object) -> EngineConfig:
        """The envelope and `max_batch` that the profile names, the engine's defaults for the rest, with changes."""
        known: dict[str, Any] = dict(self.engine)
        knobs = replace(Knobs(), max_batch=known.pop("max_batch", Knobs().max_batch))
        return EngineConfig().with_(**{**known, "knobs": knobs, **changes})

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def load_profile(name: str) -> LatencyProfile:
    """A shipped profile by name, or one from a JSON file. ConfigError says what is wrong and what there is."""
    shipped = files("kvpilot.env.profiles")
    path = Path(name) if name.endswith(".json") else None
    try:
        text = (path or shipped.joinpath(f"{name}.json")).read_text(encoding="utf-8")
    except OSError as error:
        known = sorted(p.name.removesuffix(".json") for p in shipped.iterdir() if p.name.endswith(".json"))
        what = f"cannot be read ({error.strerror})"
        raise ConfigError(f"profile {name!r} {what}: expected a file or one of {', '.join(known)}") from error
    return parse_profile(text, name)


def parse_profile(text: str, source: str) -> LatencyProfile:
    """Raises ConfigError that names `source` and what is wrong in it."""
    try:
        values = json.loads(text)
        for name in ("rows", "sampled"):
            values[name] = tuple((int(start), float(slope)) for start, slope in values.get(name, ()))
        model = values.get("model")
        values["model"] = ProfiledModel(**model) if model else None
        profile = LatencyProfile(**values)
        numbers = [
            profile.fixed,
            profile.prefill_token,
            profile.prefill_pair,
            profile.prefill_context,
            profile.sequence,
            profile.moved_byte,
        ]
        for group in (profile.kv_byte, profile.convert, profile.engine, profile.quality_loss):
            numbers += group.values()
        numbers += [number for point in (*profile.rows, *profile.sampled) for number in point]
        rising = all(a[0] < b[0] for ramp in (profile.rows, profile.sampled) for a, b in pairwise(ramp))
    except (ValueError, TypeError, AttributeError) as error:
        wanted = ", ".join(field.name for field in fields(LatencyProfile))
        raise ConfigError(
            f"profile {source!r} is malformed ({error}): expected JSON with {wanted}"
        ) from error
    if not rising or not all(isinstance(n, int | float) and 0 <= n < inf for n in numbers):
        raise ConfigError(
            f"profile {source!r} is invalid: expected every coefficient to be a number >= 0, ramps in rising order"
        )
    return profile
