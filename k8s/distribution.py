"""From a KVPolicy to the control document in its target's ConfigMap. Pure."""

import base64
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from kvpilot.k8s.control_document import (
    CONTROL_KEY,
    ControlDocument,
    ControlDocumentError,
    PolicySource,
    parse_control_document,
)
from kvpilot.k8s.policy_resource import GROUP, KIND, VERSION, ConfigMapPolicy, KVPolicy

DIGEST_ANNOTATION = f"{GROUP}/digest"  # of the document that the operator wrote
LABELS = {"app.kubernetes.io/managed-by": "kvpilot-operator", "app.kubernetes.io/part-of": "kvpilot"}


def digest_of(config_map: Mapping[str, Any], key: str) -> str | None:
    """SHA-256 of a key's content, text or binary; None if there is no such key."""
    if key in (config_map.get("data") or {}):
        return sha256(config_map["data"][key].encode()).hexdigest()
    if key in (config_map.get("binaryData") or {}):
        return sha256(base64.b64decode(config_map["binaryData"][key])).hexdigest()
    return None


def policy_problem(
    source: ConfigMapPolicy, config_map: Mapping[str, Any] | None, path: str | None
) -> tuple[str, str] | None:
    """Reason and message, if the exported policy is not what the KVPolicy says or the pods cannot read it."""
    if config_map is None:
        return "NotFound", f"there is no ConfigMap {source.name}"
    digest = digest_of(config_map, source.key)
    if digest is None:
        return "NotFound", f"ConfigMap {source.name} has no key {source.key}"
    if digest != source.sha256:
        return "HashMismatch", f"{source.name}/{source.key} has SHA-256 {digest}, expected {source.sha256}"
    if path is None:
        return "NotMounted", f"the sidecar does not mount ConfigMap {source.name}: add a volume to the target"
    return None


def make_document(
    policy: KVPolicy,
    *,
    mode: str,
    kill: bool,
    hold: str | None,
    source: PolicySource,
    canary_pods: tuple[str, ...],
    revision: int,
) -> ControlDocument:
    return ControlDocument(
        revision=revision,
        mode=mode,
        kill=kill,
        hold=hold,
        policy=source,
        slo=policy.slo,
        bounds=policy.bounds,
        limits=policy.limits,
        canary_pods=canary_pods if mode == "canary" else (),
    )


def read_document(config_map: Mapping[str, Any] | None) -> ControlDocument | None:
    """The document as the operator left it; None if there is none that can be read."""
    text = ((config_map or {}).get("data") or {}).get(CONTROL_KEY)
    if text is None:
        return None
    try:
        return parse_control_document(text)
    except ControlDocumentError:
        return None


def is_foreign(config_map: Mapping[str, Any] | None) -> bool:
    """Someone other than the operator has written the document: it must not be overwritten silently."""
    if config_map is None:
        return False
    document = read_document(config_map)
    written = (config_map["metadata"].get("annotations") or {}).get(DIGEST_ANNOTATION)
    return document is None or document.digest != written


def next_revision(policy: Mapping[str, Any], current: ControlDocument | None, now: float) -> int:
    """Above all that were ever written for the target. Unix time in milliseconds keeps that true when the KVPolicy
    was deleted and made anew: a sidecar that still knows the old one ignores lower revisions."""
    known = policy.get("status", {}).get("revision", 0)
    return max(known + 1, current.revision + 1 if current else 1, int(now * 1000))


def config_map_body(
    policy: KVPolicy, document: ControlDocument, current: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What is to be written in place of `current`, whose version it carries."""
    metadata: dict[str, Any] = {
        "name": policy.target.control_map,
        "namespace": policy.namespace,
        "labels": LABELS,
        "annotations": {DIGEST_ANNOTATION: document.digest},
        "ownerReferences": [
            {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": KIND,
                "name": policy.name,
                "uid": policy.uid,
                "controller": True,
            }
        ],
    }
    if current is not None:
        metadata["resourceVersion"] = current["metadata"]["resourceVersion"]
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "data": {CONTROL_KEY: document.to_yaml()},
    }
