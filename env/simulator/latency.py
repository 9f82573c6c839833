"""How long a step takes: non-negative weights on what it does, fitted to steps of a real engine."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from pathlib import Path

from kvpilot.engine.errors import ConfigError
from kvpilot.engine.step_features import StepFeatures

TICK = 2.0**-20  # seconds; durations are whole ticks, so that their sums are exact


@dataclass(frozen=True, kw_only=True)
class LatencyProfile:
    """Seconds per unit of each feature, and where they come from.

    `fixed` is the cost of a step that does nothing, `sequence` of each decoding request, `kv_byte[codec]` of a
    byte of pages read by decoding ones, `convert[codec]` of a page re-encoded to it.
    """

    name: str
    fixed: float
    prefill_token: float
    prefill_pair: float
    sequence: float
    kv_byte: Mapping[str, float]
    convert: Mapping[str, float]
    moved_byte: float
    origin: Mapping[
        str, object
    ]  # machine, model, versions, date, command, error; or why it is not calibrated

    def step_seconds(self, features: StepFeatures, ladder: tuple[str, ...]) -> float:
        """Duration of the step: a multiple of TICK, at least one."""
        seconds = (
            self.fixed
            + self.prefill_token * features.prefill_tokens
            + self.prefill_pair * features.prefill_attention
            + self.sequence * features.decode_sequences
            + self.moved_byte * features.moved_bytes
        )
        for level, codec in enumerate(ladder):
            seconds += self.kv_byte[codec] * features.kv_bytes[level]
            if features.converted[level]:
                seconds += self.convert[codec] * features.converted[level]
        return max(round(seconds / TICK), 1) * TICK

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")


def load_profile(name: str) -> LatencyProfile:
    """A shipped profile by name, or one from a JSON file. ConfigError says what is wrong and what there is."""
    shipped = files("kvpilot.env.profiles")
    path = Path(name) if name.endswith(".json") else None
    try:
        text = path.read_text() if path else shipped.joinpath(f"{name}.json").read_text()
    except OSError as error:
        known = sorted(p.name.removesuffix(".json") for p in shipped.iterdir() if p.name.endswith(".json"))
        what = f"cannot be read ({error.strerror})"
        raise ConfigError(f"profile {name!r} {what}: expected a file or one of {', '.join(known)}") from error
    return parse_profile(text, name)


def parse_profile(text: str, source: str) -> LatencyProfile:
    try:
        values = json.loads(text)
        profile = LatencyProfile(**values)
        numbers = [
            profile.fixed,
            profile.prefill_token,
            profile.prefill_pair,
            profile.sequence,
            profile.moved_byte,
        ]
        numbers += [*profile.kv_byte.values(), *profile.convert.values()]
    except (ValueError, TypeError, AttributeError) as error:
        wanted = ", ".join(field.name for field in fields(LatencyProfile))
        raise ConfigError(
            f"profile {source!r} is malformed ({error}): expected JSON with {wanted}"
        ) from error
    if not all(isinstance(n, int | float) and 0 <= n < 1e6 for n in numbers):
        raise ConfigError(f"profile {source!r} is invalid: expected every coefficient to be a number >= 0")
    return profile
