"""Rules and dashboards as Kubernetes takes them: a PrometheusRule, and a ConfigMap for each dashboard."""

from collections.abc import Mapping
from typing import Any

import yaml

from kvpilot.dashboards.rules import rule_document

HEAD = "# Written by `python -m kvpilot.dashboards`: change dashboards/*.py.\n"
DASHBOARD_LABEL = {"grafana_dashboard": "1"}  # what the sidecar of Grafana's Helm chart looks for


class _Literal(str):
    """Text to be shown line by line."""


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(
    _Literal, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")
)


def render_prometheus_rule() -> str:
    """The rules for the Prometheus operator."""
    head = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "kvpilot"},
    }
    return HEAD + _yaml({**head, "spec": rule_document()})


def render_config_maps(boards: Mapping[str, str]) -> str:
    """`boards` is the JSON by file name."""
    documents = []
    for name, text in boards.items():
        metadata = {"name": f"{name.removesuffix('.json')}-dashboard", "labels": DASHBOARD_LABEL}
        data = {name: _Literal(text)}
        documents.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    return HEAD + "---\n".join(_yaml(document) for document in documents)


def _yaml(document: Mapping[str, Any]) -> str:
    return yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False, width=110)
