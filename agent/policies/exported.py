"""A learned policy, run by numpy alone: `policy.json` says what it is, `policy.safetensors` holds its weights."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from kvpilot.agent.policies.numpy_network import NumpyNetwork
from kvpilot.engine.config import KNOB_NAMES, KnobBounds
from kvpilot.engine.errors import ConfigError, InputError, KVPilotError
from kvpilot.engine.files import write_whole
from kvpilot.env.observation import Observation
from kvpilot.env.policy import KnobValues, Proposal
from kvpilot.env.tuning import vector
from kvpilot.env.tuning.actions import Actions, Portfolio, actions_from_json

FORM = 1  # of the two files; rises when a reader of older ones would misread newer ones
DESCRIPTION, WEIGHTS = "policy.json", "policy.safetensors"
KNOB_PREFIX = "knob_"  # features of what the policy itself sets: they have bounds, no envelope
TOLERANCE = 0.1  # of the unit in which all features are: beyond the envelope by more is outside

Floats = NDArray[np.float32]


class PolicyFormError(InputError, ValueError):
    """A file is no exported policy, or one for another system; the message names the field and the remedy."""


@dataclass(frozen=True, kw_only=True)
class PolicyDescription:
    """All of `policy.json`: what the policy sees, what it may do, and where it comes from."""

    name: str
    actions: Actions
    stack: int  # decisions that are seen, the latest included
    averages: tuple[float, ...]  # decisions over which running averages are seen
    interval_seconds: float  # between two decisions: length of the window that is observed
    bounds: Mapping[str, KnobBounds]  # of the engine that it was trained on
    envelope_low: tuple[float, ...]  # of each feature, over the training windows
    envelope_high: tuple[float, ...]
    features: tuple[str, ...] = vector.FEATURES
    vector_form: int = vector.FORM
    provenance: Mapping[str, Any] = field(default_factory=dict)  # version, date, command, hashes
    evaluation: Mapping[str, Any] = field(default_factory=dict)  # on validation episodes

    def to_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "actions": self.actions.to_json(),
            "bounds": {name: vars(limit) for name, limit in self.bounds.items()},
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "PolicyDescription":
        """Raises PolicyFormError for features that this version does not compute, and for what is no number where one
        belongs; ConfigError and TypeError."""
        _check_numbers(values)
        changes: dict[str, Any] = {
            "actions": actions_from_json(values["actions"]),
            "bounds": {name: KnobBounds(**limit) for name, limit in values["bounds"].items()},
        }
        for name in ("averages", "envelope_low", "envelope_high", "features"):
            changes[name] = tuple(values[name])
        made = cls(**{**values, **changes})
        if (made.vector_form, made.features) != (vector.FORM, vector.FEATURES):
            pairs = zip_longest(made.features, vector.FEATURES)
            other = next(
                (f", {seen!r} where {known!r} is expected" for seen, known in pairs if seen != known), ""
            )
            raise PolicyFormError(
                f"vector_form={made.vector_form!r} with {len(made.features)} features{other} is of another version: "
                f"expected {vector.FORM} with {len(vector.FEATURES)}; train it again with `autotune train`"
            )
        return made


NUMBERS = ("stack", "averages", "interval_seconds", "bounds", "envelope_low", "envelope_high", "actions")
NO_NUMBERS = ("name", "kind", "scale", "integer")  # among them


def _check_numbers(values: Mapping[str, Any]) -> None:
    for place, value in _leaves({name: values[name] for name in NUMBERS}):
        if type(value) not in (int, float) or not math.isfinite(value):
            raise PolicyFormError(f"{place}={value!r} is invalid: expected a finite number")
    if values["interval_seconds"] <= 0:
        raise PolicyFormError(
            f"interval_seconds={values['interval_seconds']!r} is invalid: expected seconds > 0"
        )


def _leaves(values: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """What is in mappings and lists, each with its place, but for `NO_NUMBERS`."""
    if not isinstance(values, Mapping | list):
        yield place, values
        return
    items = values.items() if isinstance(values, Mapping) else enumerate(values)
    for key, value in items:
        if key not in NO_NUMBERS:
            yield from _leaves(value, f"{place}.{key}" if place else str(key))


class ExportedPolicy:
    """The most likely action, always. Needs neither torch nor gymnasium."""

    def __init__(self, description: PolicyDescription, tensors: Mapping[str, Floats], hash: str = "") -> None:
        """Raises PolicyFormError where description and tensors do not fit. `hash` is of the files."""
        self.description, self.hash, self.name = description, hash, description.name
        try:
            self.network = NumpyNetwork(tensors)
        except ValueError as error:
            raise PolicyFormError(f"{WEIGHTS}: {error}; train it again with `autotune train`") from error
        self._stack = vector.Stack(description.stack, description.averages)
        width, choices = self._stack.copies * len(description.features), sum(description.actions.sizes)
        if (self.network.num_inputs, self.network.num_actions) != (width, choices):
            raise PolicyFormError(
                f"{WEIGHTS} maps {self.network.num_inputs} inputs to {self.network.num_actions} choices: "
                f"expected {width} to {choices} as {DESCRIPTION} says; both files must be of one export"
            )
        self._low, self._high = np.array(description.envelope_low), np.array(description.envelope_high)
        self._in_envelope = np.array([not name.startswith(KNOB_PREFIX) for name in description.features])
        if not self._low.shape == self._high.shape == self._in_envelope.shape:
            raise PolicyFormError(
                f"envelope_low and envelope_high: expected {len(description.features)} numbers each"
            )

    def reset(self) -> None:
        self._stack.reset()
        self.network.reset()

    def propose(
        self, observation: Observation, knobs: KnobValues, bounds: Mapping[str, KnobBounds]
    ) -> Proposal:
        """`observation` is of one decision interval. Raises PolicyFormError for an engine with other knobs."""
        self.check_bounds(bounds)
        action = self.choose(observation, knobs, bounds)
        changes = self.description.actions.changes(action, knobs, bounds)
        return Proposal(changes, self._in_words(action))

    def choose(
        self, observation: Observation, knobs: KnobValues, bounds: Mapping[str, KnobBounds]
    ) -> tuple[int, ...]:
        """One number per entry of `actions.sizes`; moves the stack and an LSTM's state on."""
        inputs = self._stack.push(vector.vectorize(observation, knobs, bounds))
        return greedy(self.network.logits(inputs), self.description.actions.sizes)

    def check_bounds(self, bounds: Mapping[str, KnobBounds]) -> None:
        """The same knobs on the same scales, and as many rungs; ceilings may differ, settings are clipped to them."""
        if set(bounds) != set(self.description.bounds):
            raise PolicyFormError(
                f"policy {self.name!r} sets {', '.join(self.description.bounds)}; this engine has {', '.join(bounds)}: "
                "use a policy that was trained for it"
            )
        for name, limit in bounds.items():
            trained = self.description.bounds[name]
            kind = (limit.integer, limit.scale) == (trained.integer, trained.scale)
            if not kind or (name == "kv_level" and limit.high != trained.high):
                raise PolicyFormError(
                    f"policy {self.name!r} was trained with {name} {trained} ({trained.scale}); this engine has "
                    f"{limit} ({limit.scale}): use a policy that was trained for it"
                )

    def envelope_distance(self, observation: Observation) -> float:
        """How far the farthest feature lies beyond what was seen in training; 0 inside. All features are in [0, 1]."""
        lowest = {name: self.description.bounds[name].low for name in KNOB_NAMES}
        features = vector.vectorize(observation, lowest, self.description.bounds)
        beyond = np.maximum(self._low - features, features - self._high)[self._in_envelope]
        return max(float(beyond.max()), 0.0)

    def is_outside_envelope(self, observation: Observation) -> bool:
        return self.envelope_distance(observation) > TOLERANCE

    def _in_words(self, action: tuple[int, ...]) -> str:
        actions = self.description.actions
        if not any(action):
            return "hold"
        if isinstance(actions, Portfolio):
            return f"setting {actions.settings[action[0] - 1].name}"
        return f"action {action}"


def greedy(logits: Floats, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The most likely of each group of choices."""
    stops = np.cumsum(sizes).tolist()
    return tuple(int(logits[stop - size : stop].argmax()) for size, stop in zip(sizes, stops, strict=True))


def write_exported(folder: Path, description: PolicyDescription, tensors: Mapping[str, Floats]) -> None:
    """Both files, the description last: what it describes is there."""
    weights = save(dict(tensors))
    values = {
        "kvpilot_policy": FORM,
        **description.to_json(),
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
    }
    text = json.dumps(values, indent=1, allow_nan=False) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / WEIGHTS, weights)
        write_whole(folder / DESCRIPTION, text)
    except OSError as error:
        raise KVPilotError(f"{folder} cannot be written: {error.strerror}") from error


def load_exported(path: Path) -> ExportedPolicy:
    """From the folder, or its `policy.json`. Raises PolicyFormError naming file, field and remedy."""
    if path.is_file() and path.name != DESCRIPTION:
        raise PolicyFormError(
            f"{path} is no exported policy: expected a folder with {DESCRIPTION} and {WEIGHTS}; "
            f"for a result of `autotune tune` write static:{path} or hysteresis:{path}"
        )
    folder = path if path.is_dir() else path.parent
    try:
        text = (folder / DESCRIPTION).read_bytes()
        weights = (folder / WEIGHTS).read_bytes()
    except OSError as error:
        raise PolicyFormError(
            f"{error.filename} cannot be read: {error.strerror}; expected a folder with {DESCRIPTION} and {WEIGHTS}"
        ) from error
    try:
        return ExportedPolicy(_read_description(text, weights), _read_weights(weights), _hash(text))
    except (PolicyFormError, ConfigError) as error:
        raise PolicyFormError(f"{folder}: {error}") from error
    except TypeError as error:
        raise PolicyFormError(
            f"{folder}: {DESCRIPTION} is malformed ({error}): expected what `autotune train` wrote"
        ) from error


def _read_description(text: bytes, weights: bytes) -> PolicyDescription:
    remedy = "expected what `autotune train` wrote"
    try:
        values = json.loads(text)
        form = values.pop("kvpilot_policy")
        if form != FORM:
            raise PolicyFormError(f"kvpilot_policy={form!r} is of another version: expected {FORM}")
        if values.pop("weights_sha256") != hashlib.sha256(weights).hexdigest():
            raise PolicyFormError(f"{WEIGHTS} is not the one that {DESCRIPTION} describes: {remedy}")
        return PolicyDescription.from_json(values)
    except KeyError as error:
        raise PolicyFormError(f"{DESCRIPTION} has no field {error}: {remedy}") from error
    except (TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PolicyFormError(f"{DESCRIPTION} is malformed ({error}): {remedy}") from error


def _read_weights(weights: bytes) -> dict[str, Floats]:
    try:
        return load(weights)
    except SafetensorError as error:
        raise PolicyFormError(f"{WEIGHTS} is malformed ({error})") from error


def _hash(text: bytes) -> str:
    """Of the description, which holds that of the weights."""
    return hashlib.sha256(text).hexdigest()
