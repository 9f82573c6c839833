"""What a workload and its pods are up to. Pure functions over dicts as the API returns them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

SIDECAR = "autotune"  # name of the sidecar's container
ENGINE_PORT = "http"  # name of the engine's port, where /metrics is


class Pod(NamedTuple):
    """A pod that serves. Another uid or restart count is another process with other counters."""

    name: str
    uid: str
    restarts: int
    created: str
    metrics_url: str


class Hold(NamedTuple):
    """Why nothing may be changed just now: one word for machines, a sentence for people."""

    reason: str
    message: str


def why_hold(workload: Mapping[str, Any]) -> Hold | None:
    """The motion that the target is in, or None. While it lasts, its numbers say nothing about the knobs."""
    spec, status = workload.get("spec", {}), workload.get("status", {})
    generation, wanted = workload["metadata"].get("generation", 0), spec.get("replicas", 1)
    replicas, updated, ready = (
        status.get(name, 0) for name in ("replicas", "updatedReplicas", "readyReplicas")
    )
    if status.get("observedGeneration", 0) < generation:
        return Hold("Rollout", "the latest change of the workload has not been observed yet")
    if updated < wanted:
        return Hold("Rollout", f"{updated} of {wanted} pods are updated")
    if replicas != wanted:
        return Hold("Scaling", f"{replicas} pods, {wanted} wanted")
    if ready < wanted:
        return Hold("NotReady", f"{ready} of {wanted} pods are ready")
    return None


def selector_of(workload: Mapping[str, Any]) -> str:
    """The workload's own selector in the form of a query."""
    selector = workload["spec"]["selector"]
    parts = [f"{key}={value}" for key, value in selector.get("matchLabels", {}).items()]
    for expression in selector.get("matchExpressions", []):
        key, values = expression["key"], ",".join(expression.get("values", []))
        match expression["operator"]:
            case "In":
                parts.append(f"{key} in ({values})")
            case "NotIn":
                parts.append(f"{key} notin ({values})")
            case "Exists":
                parts.append(key)
            case "DoesNotExist":
                parts.append(f"!{key}")
    return ",".join(parts)


def serving_pods(pods: Iterable[Mapping[str, Any]]) -> list[Pod]:
    """Those that are ready, have an address and are not going away; the oldest first."""
    found = [_pod(pod) for pod in pods if _serves(pod)]
    return sorted(found, key=lambda pod: (pod.created, pod.name))


def choose_canaries(pods: Sequence[Pod], count: int, previous: Iterable[str]) -> tuple[str, ...]:
    """`count` names, the previous ones first; empty if no pod would be left as the baseline."""
    if len(pods) <= count:
        return ()
    kept = set(previous)
    ranked = sorted(pods, key=lambda pod: pod.name not in kept)  # stable: the oldest first within each
    return tuple(sorted(pod.name for pod in ranked[:count]))


def mounted_at(workload: Mapping[str, Any], config_map: str, key: str) -> str | None:
    """The path of a ConfigMap's key in the sidecar, or None if it does not mount it."""
    template = workload["spec"]["template"]["spec"]
    volumes = {
        volume["name"]: volume["configMap"].get("items")
        for volume in template.get("volumes", [])
        if volume.get("configMap", {}).get("name") == config_map
    }
    for mount in _sidecar(template).get("volumeMounts", []):
        if mount["name"] not in volumes or "subPath" in mount:
            continue
        items = volumes[mount["name"]]
        paths = {key: key} if items is None else {item["key"]: item["path"] for item in items}
        if key in paths:
            return f"{mount['mountPath'].rstrip('/')}/{paths[key]}"
    return None


def _sidecar(template: Mapping[str, Any]) -> Mapping[str, Any]:
    containers = (*template.get("initContainers", []), *template.get("containers", []))
    return next((each for each in containers if each["name"] == SIDECAR), {})


def _serves(pod: Mapping[str, Any]) -> bool:
    status = pod.get("status", {})
    ready = any(
        condition["type"] == "Ready" and condition["status"] == "True"
        for condition in status.get("conditions", [])
    )
    return ready and bool(status.get("podIP")) and "deletionTimestamp" not in pod["metadata"]


def _pod(pod: Mapping[str, Any]) -> Pod:
    metadata, status = pod["metadata"], pod["status"]
    ports = [
        port["containerPort"]
        for container in pod["spec"]["containers"]
        for port in container.get("ports", [])
        if port.get("name") == ENGINE_PORT
    ]
    address = status["podIP"]
    host = f"[{address}]" if ":" in address else address
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        restarts=sum(each.get("restartCount", 0) for each in status.get("containerStatuses", [])),
        created=metadata["creationTimestamp"],
        metrics_url=f"http://{host}:{ports[0] if ports else 8000}/metrics",
    )
