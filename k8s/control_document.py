"""The contract between operator and sidecar: one YAML document in the ConfigMap key `control.yaml`.

The operator writes it, the sidecar reads it; neither knows more of the other. Numbers are integers in the unit
that the key names, as in the KVPolicy resource. Every key but `revision` may be left out.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from pathlib import PurePosixPath
from typing import Any, TypeVar

import yaml

from kvpilot.engine.errors import ConfigError

CONTROL_KEY = "control.yaml"
MODES = ("off", "advisory", "canary", "auto")
ROLES = ("canary", "baseline")
SCHEMA = 1  # rises when a reader of the old form would misread the new one
HEX_DIGITS = frozenset("0123456789abcdef")


class ControlDocumentError(ConfigError):
    """The document is not what this version understands; the message names key, value and what is expected.

    A reader keeps the last document that it understood.
    """


def _check(ok: bool, key: str, value: object, expected: str) -> None:
    if not ok:
        raise ControlDocumentError(f"{key}={value!r} is invalid: expected {expected}")


def _check_integer(key: str, value: object, low: int, high: int) -> None:
    fits = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    _check(fits, key, value, f"an integer in [{low}, {high}]")


@dataclass(frozen=True, kw_only=True)
class PolicySource:
    """A policy that ships with kvpilot, by name, or an exported one as a file in the sidecar."""

    name: str | None = None
    file: str | None = None  # absolute path, as mounted
    sha256: str | None = None  # of the file; what is read must have it

    def __post_init__(self) -> None:
        both = (self.name, self.file)
        _check(both.count(None) == 1, "policy", both, "one of the keys name and file")
        if self.name is not None:
            _check(bool(self.name) and isinstance(self.name, str), "policy.name", self.name, "a name")
            _check(
                self.sha256 is None, "policy.sha256", self.sha256, "none for a policy that ships with kvpilot"
            )
            return
        _check(
            isinstance(self.file, str) and PurePosixPath(self.file).is_absolute(),
            *("policy.file", self.file, "an absolute path"),
        )
        digest = self.sha256
        known = isinstance(digest, str) and len(digest) == 64 and set(digest) <= HEX_DIGITS
        _check(known, "policy.sha256", digest, "the file's SHA-256 in 64 lower-case hex digits")


@dataclass(frozen=True, kw_only=True)
class Slo:
    """What the guard vetoes by. None: no limit of this kind."""

    ttft_p99_milliseconds: int | None = None  # arrival to first token
    inter_token_p99_milliseconds: int | None = None
    queue_p99_milliseconds: int | None = None  # arrival to admission
    violation_permille: int | None = None  # share of requests allowed beyond the limits above
    quality_loss_micronats: int | None = None  # mean KL per token against an exact cache, in 1e-6 nats

    def __post_init__(self) -> None:
        highest = {"violation_permille": 1000, "quality_loss_micronats": 10_000_000}
        for key, value in asdict(self).items():
            if value is not None:
                _check_integer(f"slo.{key}", value, 0 if key in highest else 1, highest.get(key, 3_600_000))


@dataclass(frozen=True, kw_only=True)
class Range:
    """Inclusive. None: whatever the engine's envelope allows."""

    low: int | None = None
    high: int | None = None


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Narrower than the engine's envelope, never wider: a reader takes the intersection."""

    ttl_seconds: Range = field(default_factory=Range)
    size_factor_permille: Range = field(default_factory=Range)
    max_batch: Range = field(default_factory=Range)
    kv_level: Range = field(default_factory=Range)

    def __post_init__(self) -> None:
        limits = {
            "ttl_seconds": (0, 86_400),
            "size_factor_permille": (0, 1000),
            "max_batch": (1, 1_000_000),
            "kv_level": (0, 15),
        }
        for key, (lowest, highest) in limits.items():
            low, high = self.range(key).low, self.range(key).high
            for side, value in (("low", low), ("high", high)):
                if value is not None:
                    _check_integer(f"bounds.{key}.{side}", value, lowest, highest)
            if low is not None and high is not None:
                _check(low <= high, f"bounds.{key}.low", low, f"at most bounds.{key}.high={high}")

    def range(self, key: str) -> Range:
        return getattr(self, key)

    def by_knob(self) -> dict[str, tuple[float | None, float | None]]:
        """Low and high of each knob in the knob's own unit (size_factor as a share, not in permille)."""
        factor = self.size_factor_permille
        shares = [None if value is None else value / 1000 for value in (factor.low, factor.high)]
        return {
            "ttl_seconds": (self.ttl_seconds.low, self.ttl_seconds.high),
            "size_factor": (shares[0], shares[1]),
            "max_batch": (self.max_batch.low, self.max_batch.high),
            "kv_level": (self.kv_level.low, self.kv_level.high),
        }


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How fast the loop may go. None: the sidecar's own setting."""

    interval_seconds: int | None = None  # between two observations
    decision_seconds: int | None = None  # between two decisions
    min_change_seconds: int | None = None  # between two changes of a knob
    settle_seconds: int | None = None  # after a change, before its effect is judged
    max_reverts_per_hour: int | None = None  # then safe mode

    def __post_init__(self) -> None:
        for key, value in asdict(self).items():
            if value is not None:
                reverts = key == "max_reverts_per_hour"
                _check_integer(f"limits.{key}", value, 0 if reverts else 1, 100 if reverts else 86_400)


@dataclass(frozen=True, kw_only=True)
class ControlDocument:
    """What the sidecars of one target are to do. A higher `revision` replaces a lower one."""

    revision: int  # rises with every change that the operator writes
    mode: str = "advisory"
    kill: bool = False  # write nothing, whatever else is said
    hold: str | None = (
        None  # why nothing may be changed just now (a rollout, scaling); None: nothing speaks against it
    )
    policy: PolicySource | None = None  # None: the sidecar's own setting
    slo: Slo = field(default_factory=Slo)
    bounds: Bounds = field(default_factory=Bounds)
    limits: Limits = field(default_factory=Limits)
    canary_pods: tuple[
        str, ...
    ] = ()  # names of the pods that act in mode canary; the others are the baseline

    def __post_init__(self) -> None:
        _check_integer("revision", self.revision, 1, 2**53)
        _check(self.mode in MODES, "mode", self.mode, f"one of {', '.join(MODES)}")
        _check(isinstance(self.kill, bool), "kill", self.kill, "true or false")
        held = self.hold is None or (isinstance(self.hold, str) and bool(self.hold))
        _check(held, "hold", self.hold, "a reason in words, or null")
        named = all(isinstance(pod, str) and pod for pod in self.canary_pods)
        _check(named, "canary_pods", self.canary_pods, "a list of pod names")

    def role(self, pod: str | None) -> str | None:
        """`canary` or `baseline` in mode canary, else None. A pod that does not know its name is baseline."""
        if self.mode != "canary":
            return None
        return "canary" if pod in self.canary_pods else "baseline"

    def mode_of(self, pod: str | None) -> str:
        """`off`, `advisory` or `auto`: what this pod's sidecar does. Killed is off; a baseline pod only advises."""
        if self.kill:
            return "off"
        if self.mode != "canary":
            return self.mode
        return "auto" if self.role(pod) == "canary" else "advisory"

    @property
    def digest(self) -> str:
        """SHA-256 of the document's content without its revision: what has to change for a new revision."""
        content = {**self.as_dict(), "revision": 0}
        return sha256(yaml.safe_dump(content, sort_keys=True).encode()).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """Plain values, without the keys that are None or empty."""
        document: dict[str, Any] = {"schema": SCHEMA, **asdict(self), "canary_pods": list(self.canary_pods)}
        return _without_empty(document)

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.as_dict(), sort_keys=False)


def _without_empty(mapping: Mapping[str, Any]) -> dict[str, Any]:
    inner = {
        key: _without_empty(value) if isinstance(value, dict) else value for key, value in mapping.items()
    }
    return {key: value for key, value in inner.items() if value not in (None, {}, [])}


def parse_control_document(text: str) -> ControlDocument:
    """The document in a YAML (or JSON) text; ControlDocumentError for unknown keys and values out of bounds."""
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ControlDocumentError(f"{CONTROL_KEY} is not YAML: {error}") from error
    keys = dict(_mapping(content, CONTROL_KEY))
    schema = keys.pop("schema", SCHEMA)
    _check(schema == SCHEMA, "schema", schema, f"{SCHEMA}, the one that this version of kvpilot reads")
    _check("revision" in keys, "revision", None, "an integer >= 1")
    if keys.get("mode") is False:  # what YAML 1.1 makes of an unquoted off
        keys["mode"] = "off"
    parts = {"policy": PolicySource, "slo": Slo, "limits": Limits}
    for key in parts.keys() & keys.keys():
        keys[key] = _build(parts[key], keys[key], key)
    if "bounds" in keys:
        ranges = _mapping(keys["bounds"], "bounds")
        built = {key: _build(Range, value, f"bounds.{key}") for key, value in ranges.items()}
        keys["bounds"] = _build(Bounds, built, "bounds")
    if "canary_pods" in keys:
        _check(
            isinstance(keys["canary_pods"], list), "canary_pods", keys["canary_pods"], "a list of pod names"
        )
        keys["canary_pods"] = tuple(keys["canary_pods"])
    return _build(ControlDocument, keys, "")


Part = TypeVar("Part", PolicySource, Slo, Limits, Range, Bounds, ControlDocument)


def _build(kind: type[Part], content: object, key: str) -> Part:
    known = [part.name for part in fields(kind)]
    mapping = _mapping(content, key)
    for name in mapping:
        path = f"{key}.{name}" if key else str(name)
        _check(name in known, path, mapping[name], f"no such key, only {', '.join(known)}")
    return kind(**mapping)


def _mapping(content: object, key: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ControlDocumentError(f"{key}={content!r:.80} is invalid: expected keys and values")
    return content
