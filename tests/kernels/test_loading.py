"""Which implementation is chosen."""

import importlib

import pytest
import torch

from kvpilot.engine import kernels
from kvpilot.engine.kernels.cpu import load_library


def refuse(name: str):
    raise ImportError(name)


def test_the_environment_forces_torch_operations(monkeypatch):
    monkeypatch.setenv("KVPILOT_KERNELS", "torch")
    assert load_library() is None


def test_without_a_built_library_torch_operations_are_used(monkeypatch):
    monkeypatch.delenv("KVPILOT_KERNELS", raising=False)
    monkeypatch.setattr(importlib, "import_module", refuse)
    assert load_library() is None


@pytest.mark.parametrize(
    ("capability", "name"), [("AVX512", "v4"), ("AVX2", "v3"), ("DEFAULT", "any"), ("SVE256", "any")]
)
def test_the_best_library_for_the_cpu_is_asked_for_first(monkeypatch, capability, name):
    asked = []
    monkeypatch.delenv("KVPILOT_KERNELS", raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(importlib, "import_module", lambda module: asked.append(module) or kernels)
    load_library()
    assert asked == [f"kvpilot.engine.kernels._cpu_{name}"]
