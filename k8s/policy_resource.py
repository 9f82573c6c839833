"""The custom resource KVPolicy as a frozen object. Pure: a dict as the API returns it in, a KVPolicy out."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from kvpilot.engine.errors import ConfigError
from kvpilot.k8s.control_document import MODES, Bounds, Limits, Range, Slo
from kvpilot.k8s.gates import DEFAULT_GATES, Gate

GROUP, VERSION, PLURAL, KIND = "kvpilot.dev", "v1alpha1", "kvpolicies", "KVPolicy"
KILL_ANNOTATION = f"{GROUP}/kill"  # on the KVPolicy or on the workload: "true" stops all writing
WORKLOAD_KINDS = ("Deployment", "StatefulSet")


class SpecError(ConfigError):
    """A KVPolicy asks for what cannot be; the message names field, value and what is expected."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The workload whose pods are tuned, in the namespace of its KVPolicy."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"

    @property
    def control_map(self) -> str:
        """The ConfigMap that the pods of the target mount and watch."""
        return f"{self.name}-control"

    @property
    def lease(self) -> str:
        return f"kvpilot-{self.kind.lower()}-{self.name}"


@dataclass(frozen=True, kw_only=True)
class ConfigMapPolicy:
    """An exported policy in a ConfigMap that the pods mount."""

    name: str
    key: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class CanarySettings:
    replicas: int = 1  # pods that act; at least one other is the baseline
    warmup_seconds: int = 60  # after the pods got their role, before anything is measured
    observe_seconds: int = 600  # length of the window that the gates compare
    timeout_seconds: int = 3600  # without enough samples by then: failed
    promote: bool = False  # passed: all pods act; otherwise the canary goes on until spec.mode says auto
    gates: tuple[Gate, ...] = DEFAULT_GATES


@dataclass(frozen=True, kw_only=True)
class KVPolicy:
    name: str
    namespace: str
    uid: str
    generation: int
    created: str  # RFC 3339
    target: Target
    mode: str
    kill: bool
    builtin: str | None  # name of a policy that ships with kvpilot; None: `config_map`
    config_map: ConfigMapPolicy | None
    slo: Slo
    bounds: Bounds
    limits: Limits
    canary: CanarySettings = field(default_factory=CanarySettings)


def parse_target(resource: Mapping[str, Any]) -> Target:
    """The target alone: who leads is settled before the rest is looked at."""
    target = resource.get("spec", {}).get("target", {})
    kind, name = target.get("kind", WORKLOAD_KINDS[0]), target.get("name")
    if kind not in WORKLOAD_KINDS:
        raise SpecError(f"spec.target.kind={kind!r} is invalid: expected one of {', '.join(WORKLOAD_KINDS)}")
    if not isinstance(name, str) or not name:
        raise SpecError(f"spec.target.name={name!r} is invalid: expected the name of a {kind}")
    return Target(kind=kind, name=name)


def parse_policy(resource: Mapping[str, Any]) -> KVPolicy:
    """SpecError says what the schema of the CRD could not check, or an old API server did not."""
    metadata, spec = resource["metadata"], resource.get("spec", {})
    target = parse_target(resource)
    mode = spec.get("mode", "advisory")
    if mode not in MODES:
        raise SpecError(f"spec.mode={mode!r} is invalid: expected one of {', '.join(MODES)}")
    builtin, config_map = _policy_source(spec.get("policy", {"builtin": "threshold"}))
    try:
        return KVPolicy(
            name=metadata["name"],
            namespace=metadata["namespace"],
            uid=metadata["uid"],
            generation=metadata["generation"],
            created=metadata["creationTimestamp"],
            target=target,
            mode=mode,
            kill=bool(spec.get("killSwitch", False)) or has_kill_annotation(resource),
            builtin=builtin,
            config_map=config_map,
            slo=_build(Slo, spec.get("slo", {}), "slo"),
            bounds=_bounds(spec.get("bounds", {})),
            limits=_build(Limits, spec.get("limits", {}), "limits"),
            canary=_canary(spec.get("canary", {})),
        )
    except SpecError:
        raise
    except ConfigError as error:
        raise SpecError(f"spec.{error}") from error


def has_kill_annotation(resource: Mapping[str, Any]) -> bool:
    """Any value but "false" kills: a typing error must not keep the switch from working."""
    value = (resource["metadata"].get("annotations") or {}).get(KILL_ANNOTATION)
    return value is not None and value.strip().lower() != "false"


def _policy_source(source: Mapping[str, Any]) -> tuple[str | None, ConfigMapPolicy | None]:
    if ("builtin" in source) == ("configMap" in source):
        raise SpecError(f"spec.policy={dict(source)!r} is invalid: expected one of builtin and configMap")
    if "builtin" in source:
        return source["builtin"], None
    return None, _build(ConfigMapPolicy, source["configMap"], "policy.configMap")


def _bounds(spec: Mapping[str, Any]) -> Bounds:
    ranges = {name: _build(Range, value, f"bounds.{name}") for name, value in spec.items()}
    return _build(Bounds, ranges, "bounds")


def _canary(spec: Mapping[str, Any]) -> CanarySettings:
    settings = dict(spec)
    if "gates" in settings:
        gates = tuple(_build(Gate, gate, "canary.gates") for gate in settings["gates"])
        if not gates:
            raise SpecError("spec.canary.gates=[] is invalid: expected at least one gate")
        settings["gates"] = gates
    canary = _build(CanarySettings, settings, "canary")
    needed = canary.warmup_seconds + canary.observe_seconds
    if canary.timeout_seconds < needed:
        raise SpecError(
            f"spec.canary.timeoutSeconds={canary.timeout_seconds} is invalid: expected at least warmupSeconds + "
            f"observeSeconds = {needed}"
        )
    return canary


Part = TypeVar("Part", Slo, Limits, Range, Bounds, Gate, CanarySettings, ConfigMapPolicy)


def _build(kind: type[Part], spec: Mapping[str, Any], path: str) -> Part:
    known = {part.name for part in fields(kind)}
    names = {name: snake_case(name) for name in spec}
    for name, snake in names.items():
        if snake not in known:
            raise SpecError(f"spec.{path}.{name} is unknown to this version of the operator")
    try:
        return kind(**{snake: spec[name] for name, snake in names.items()})
    except TypeError as error:
        raise SpecError(f"spec.{path} is incomplete: {error}") from error


def snake_case(name: str) -> str:
    """ttftP99Milliseconds -> ttft_p99_milliseconds."""
    return re.sub(r"[A-Z]", lambda capital: f"_{capital[0].lower()}", name)
