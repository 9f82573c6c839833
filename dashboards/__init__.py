"""Grafana dashboards and Prometheus rules: written by `python -m kvpilot.dashboards`, checked in beside."""
