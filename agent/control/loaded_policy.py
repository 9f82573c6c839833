"""A policy with its identity: what an audit log names, and a replay loads again."""

import hashlib
from pathlib import Path
from typing import NamedTuple

from kvpilot.agent.policies import load_policy
from kvpilot.agent.policies.spec import interval_of, parse_spec
from kvpilot.engine.errors import ConfigError
from kvpilot.env.policy import Policy
from kvpilot.k8s.control_document import PolicySource


class LoadedPolicy(NamedTuple):
    policy: Policy
    spec: str  # as `load_policy` takes it
    digest: str  # SHA-256 of all that decides what it does

    @property
    def trained_seconds(self) -> float | None:
        """Between two decisions, if it was trained on an interval."""
        return interval_of(self.policy)


def load(spec: str, *, decision_seconds: float | None = None) -> LoadedPolicy:
    """Raises ConfigError, also where the policy was trained on decisions that lie further apart, or nearer."""
    policy = load_policy(spec)
    digest = getattr(policy, "hash", "") or hashlib.sha256(parse_spec(spec).key.encode()).hexdigest()
    loaded = LoadedPolicy(policy, spec, digest)
    trained = loaded.trained_seconds
    if trained is not None and decision_seconds is not None and trained != decision_seconds:
        raise ConfigError(
            f"decision_seconds={decision_seconds:g} is invalid for policy {policy.name!r}: expected {trained:g}, "
            "the interval it was trained on, or nothing at all"
        )
    return loaded


def load_source(source: PolicySource, *, decision_seconds: float | None) -> LoadedPolicy:
    """What the control document names; ConfigError if a file is not the one it means."""
    if source.name is not None:
        return load(source.name, decision_seconds=decision_seconds)
    assert source.file is not None
    try:
        digest = hashlib.sha256(Path(source.file).read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"policy.file={source.file!r} cannot be read: {error.strerror}") from error
    if digest != source.sha256:
        raise ConfigError(f"policy.file={source.file!r} has SHA-256 {digest}: expected {source.sha256}")
    return load(source.file, decision_seconds=decision_seconds)
