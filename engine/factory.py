"""Puts an engine together: model, page storage, attention, runner, scheduler."""

from kvpilot.engine.attention import PagedAttention, rope_tables
from kvpilot.engine.config import EngineConfig
from kvpilot.engine.engine import Engine
from kvpilot.engine.kv.formats import PageShape
from kvpilot.engine.kv.quality import quality_loss
from kvpilot.engine.kv.torch_storage import TorchStorage
from kvpilot.engine.model.llama import Llama
from kvpilot.engine.runners.torch_runner import TorchRunner


def build_engine(
    model: Llama, config: EngineConfig, *, model_name: str = "", engine_class: type[Engine] = Engine
) -> Engine:
    """An engine on the CPU for a loaded model. Raises ConfigError if the envelope does not fit the model.

    `model_name` looks up the measured quality loss of each codec; for an unknown model it is reported as 0.
    """
    shape = PageShape(
        num_layers=model.config.num_layers,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        page_size=config.page_size,
    )
    storage = TorchStorage(shape, config.ladder, config.pool_bytes)
    rope = rope_tables(model.config.rope_inverse_frequencies, model.config.max_position)
    attention = PagedAttention(shape, model.config.num_heads, storage, rope, model.dtype)
    return engine_class(
        config,
        shape,
        TorchRunner(model, attention),
        storage,
        model_max_len=model.config.max_position,
        quality_loss=quality_loss(model_name),
    )
