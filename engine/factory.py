"""Puts an engine together: model, page storage, attention, runner, scheduler."""

from collections.abc import Callable

import torch

from kvpilot.engine.attention import PagedAttention, rope_tables
from kvpilot.engine.config import EngineConfig
from kvpilot.engine.engine import Engine
from kvpilot.engine.errors import ConfigError
from kvpilot.engine.kv.formats import PageShape, payload_bytes
from kvpilot.engine.kv.quality import quality_loss
from kvpilot.engine.kv.storage import PageStorage
from kvpilot.engine.kv.torch_storage import TorchStorage
from kvpilot.engine.model.llama import Llama
from kvpilot.engine.runners.base import Runner
from kvpilot.engine.runners.torch_runner import TorchRunner

Progress = Callable[[int, int], None]
MAX_SPARES = 32  # sequences that may begin a page in a step that runs ahead of its schedule


def _ignore(done: int, total: int) -> None: ...


def build_engine(
    model: Llama,
    config: EngineConfig,
    *,
    model_name: str = "",
    engine_class: type[Engine] = Engine,
    progress: Progress = _ignore,
) -> Engine:
    """An engine on the model's device. Raises ConfigError if the envelope does not fit the model or the device.

    `model_name` looks up the measured quality loss of each codec; for an unknown model it is absent. On a GPU
    all CUDA graphs are captured here, which takes a while: `progress(done, total)`.
    """
    shape = PageShape(
        num_layers=model.config.num_layers,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        page_size=config.page_size,
    )
    on_gpu = model.device.type == "cuda"
    runner, storage = _on_gpu(model, config, shape, progress) if on_gpu else _on_cpu(model, config, shape)
    return engine_class(
        config,
        shape,
        runner,
        storage,
        model_max_len=model.config.max_position,
        quality_loss=quality_loss(model_name),
    )


def _on_cpu(model: Llama, config: EngineConfig, shape: PageShape) -> tuple[Runner, PageStorage]:
    storage = TorchStorage(shape, config.ladder, config.pool_bytes)
    rope = rope_tables(model.config.rope_inverse_frequencies, model.config.max_position)
    attention = PagedAttention(shape, model.config.num_heads, storage, rope)
    return TorchRunner(model, attention, model.device), storage


def _on_gpu(
    model: Llama, config: EngineConfig, shape: PageShape, progress: Progress
) -> tuple[Runner, PageStorage]:
    try:
        from kvpilot.engine.kv.cuda_storage import CudaStorage
        from kvpilot.engine.runners.cuda_runner import CudaRunner
    except ImportError as error:
        raise ConfigError(
            f"device={model.device} needs triton, which cannot be imported ({error}): pip install 'kvpilot[cuda]'"
        ) from error
    if model.dtype != torch.bfloat16:
        raise ConfigError(f"dtype={model.dtype} is invalid: on a GPU the model computes in torch.bfloat16")
    storage = CudaStorage(
        shape,
        config.ladder,
        config.pool_bytes,
        model.config.num_heads,
        model.device,
        num_spares=min(config.max_batch_ceiling, MAX_SPARES),
    )
    fits = config.pool_bytes // payload_bytes(config.ladder[0], shape) * config.page_size
    max_tokens = min(config.max_model_len or fits, fits, model.config.max_position)
    runner = CudaRunner(model, storage, max_sequences=config.max_batch_ceiling, max_tokens=max_tokens)
    runner.warm_up(progress)
    return runner, storage
