"""A policy as data: what travels to worker processes, what results are kept by, what reports name."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpilot.engine.errors import ConfigError
from kvpilot.env.policy import Policy

if TYPE_CHECKING:
    from kvpilot.agent.tune.result import Setting, TunedResult

KINDS = ("named", "static", "hysteresis", "oracle", "file")


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """`config` says all that decides what the policy does, `digest` is of the files behind it.

    named {name, and its arguments}; static {knobs}; hysteresis {fields of HysteresisConfig};
    oracle {arguments of OraclePolicy}; file {path, as for load_policy}.
    """

    label: str  # in tables; several files with one label are seeds of one policy
    kind: str
    config: Mapping[str, Any] = field(default_factory=dict)
    digest: str = ""
    decide_seconds: float | None = None  # between two decisions, where the policy was made for one interval

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"kind={self.kind!r} is invalid: expected {', '.join(KINDS)}")

    @property
    def key(self) -> str:
        """Equal for policies that decide alike: the label is not part of it, nor where a file lies."""
        config = {name: value for name, value in self.config.items() if name != "path"}
        return json.dumps([self.kind, config, self.digest], sort_keys=True)

    def make(self) -> Policy:
        """A new one, at its beginning."""
        from kvpilot.agent.policies import NAMED, load_policy
        from kvpilot.agent.policies.hysteresis import HysteresisConfig, HysteresisPolicy
        from kvpilot.agent.policies.oracle import OraclePolicy
        from kvpilot.agent.policies.static import StaticPolicy

        match self.kind:
            case "named":
                options = {name: value for name, value in self.config.items() if name != "name"}
                return NAMED[self.config["name"]](**options)
            case "static":
                return StaticPolicy(self.config["knobs"], self.label)
            case "hysteresis":
                return HysteresisPolicy(HysteresisConfig.from_json(self.config))
            case "oracle":
                return OraclePolicy(**self.config)
            case _:
                return load_policy(self.config["path"])


def static_spec(knobs: Mapping[str, float], label: str = "static") -> PolicySpec:
    return PolicySpec(label=label, kind="static", config={"knobs": dict(knobs)})


def tuned_specs(tuned: "TunedResult") -> list[PolicySpec]:
    """`static-best` and `hysteresis`."""
    rule = PolicySpec(label="hysteresis", kind="hysteresis", config=tuned.hysteresis.to_json())
    return [static_spec(tuned.static_best.knobs, "static-best"), rule]


def oracle_spec(portfolio: "tuple[Setting, ...]", seconds: float, every_seconds: float) -> PolicySpec:
    """Over the settings of a portfolio; see OraclePolicy."""
    settings = [dict(setting.knobs) for setting in portfolio]
    config = {"settings": settings, "seconds": seconds, "every_seconds": every_seconds}
    return PolicySpec(label="oracle", kind="oracle", config=config)


def parse_spec(text: str) -> PolicySpec:
    """`[LABEL=]SPEC`, with SPEC as `load_policy` takes it. Loads it once, so that what is wrong shows at once."""
    from kvpilot.agent.policies import FROM_FILE, NAMED, load_policy

    prefixes = tuple(f"{kind}:" for kind in FROM_FILE)
    has_label = "=" in text and not Path(text).exists()  # paths may hold an = themselves
    label, equals, spec = text.partition("=") if has_label else ("", "", text)
    policy = load_policy(spec)
    label = label if equals else policy.name
    if spec in NAMED:
        digest = getattr(policy, "hash", "")
        return PolicySpec(
            label=label,
            kind="named",
            config={"name": spec},
            digest=digest,
            decide_seconds=interval_of(policy),
        )
    kind, _, source = spec.partition(":") if spec.startswith(prefixes) else ("", "", spec)
    return PolicySpec(
        label=label,
        kind="file",
        config={"path": spec},
        digest=f"{kind}:{files_digest(Path(source))}",
        decide_seconds=interval_of(policy),
    )


def interval_of(policy: Policy) -> float | None:
    """Seconds between two decisions, of a learned policy."""
    return getattr(getattr(policy, "description", None), "interval_seconds", None)


def files_digest(path: Path) -> str:
    """Of a file, or of all files of a folder with their names."""
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    digest = hashlib.sha256()
    for file in sorted(entry for entry in path.rglob("*") if entry.is_file()):
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
