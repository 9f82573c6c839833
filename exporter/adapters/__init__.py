"""Engines that are not ours, seen through our statistics."""

from kvpilot.exporter.adapters import sglang, vllm
from kvpilot.exporter.adapters.base import AdaptedSource, MetricMap
from kvpilot.exporter.adapters.capabilities import Adapter, Advice, Capability, Discovery

__all__ = ["ADAPTERS", "AdaptedSource", "Adapter", "Advice", "Capability", "Discovery", "MetricMap"]

ADAPTERS = {"vllm": vllm.ADAPTER, "sglang": sglang.ADAPTER}
