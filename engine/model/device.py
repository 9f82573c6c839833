"""Where a model computes, and with which kernels."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvpilot.engine.errors import ConfigError
from kvpilot.engine.model.config import ModelConfig
from kvpilot.engine.model.llama import Llama, default_dtype

DEVICES = ("cpu", "cuda")


def make_llama(
    config: ModelConfig, get: Callable[[str], Tensor], dtype: torch.dtype | None, device: torch.device
) -> Llama:
    """The model with the elementwise kernels of its device; `get` must put tensors there."""
    if device.type != "cuda":
        return Llama(config, get, dtype or default_dtype())
    from kvpilot.engine.kernels.gpu import elementwise

    return Llama(config, get, dtype or torch.bfloat16, elementwise)


def usable_device(device: str) -> torch.device:
    """ConfigError that says what is missing, if torch cannot use it or the GPU kernels cannot be built."""
    if device not in DEVICES:
        raise ConfigError(f"device={device!r} is invalid: expected {' or '.join(DEVICES)}")
    if device == "cuda":
        if not torch.cuda.is_available():
            build = "this torch is built without CUDA" if torch.version.cuda is None else "torch sees no GPU"
            raise ConfigError(
                f"device='cuda' cannot be used: {build}; use device='cpu' or install torch for CUDA"
            )
        try:
            import triton  # noqa: F401  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError(
                "device='cuda' needs triton, which is not installed: pip install 'kvpilot[cuda]'"
            ) from error
    return torch.device(device)
