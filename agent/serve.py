"""`autotune serve`: a model, an engine around it, its metrics, and the two APIs. Imports torch and FastAPI."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry

from kvpilot.engine.config import EngineConfig
from kvpilot.engine.errors import ConfigError
from kvpilot.engine.factory import build_engine
from kvpilot.engine.kernels import IMPLEMENTATION
from kvpilot.engine.model.device import DEVICES
from kvpilot.engine.model.load import LOAD_FORMATS, load_model
from kvpilot.engine.server.run import ServerConfig, bind, serve
from kvpilot.engine.server.token import resolve_token
from kvpilot.exporter.collector import EngineCollector, metrics_source

log = logging.getLogger(__name__)

DTYPES = {"auto": None, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    admin_token_file: Path
    model: str = "smollm2"
    host: str = "127.0.0.1"
    port: int = 8000
    admin_port: int = 8001
    dtype: str = "auto"  # of the computation
    device: str = "cpu"
    load_format: str = "auto"  # "dummy": random weights in the model's shape
    threads: int | None = None  # None: what torch finds
    record: Path | None = None  # a trace of the requests is appended here
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r} is invalid: expected one of {', '.join(DTYPES)}")
        if self.device not in DEVICES:
            raise ConfigError(f"device={self.device!r} is invalid: expected one of {', '.join(DEVICES)}")
        if self.load_format not in LOAD_FORMATS:
            expected = ", ".join(LOAD_FORMATS)
            raise ConfigError(f"load_format={self.load_format!r} is invalid: expected one of {expected}")
        if self.device == "cuda" and self.dtype == "fp32":
            raise ConfigError("dtype='fp32' is invalid with device='cuda': expected bf16 or auto")
        cores = os.cpu_count() or 1
        if self.threads is not None and not 1 <= self.threads <= cores:
            raise ConfigError(
                f"threads={self.threads} is invalid: expected 1 to {cores}, the cores of this machine"
            )
        if self.port == self.admin_port != 0:
            raise ConfigError(f"admin_port={self.admin_port} is invalid: expected another one than port")

    @property
    def model_name(self) -> str:
        """As the OpenAI API calls it: a path's last part, otherwise the name itself."""
        return Path(self.model).name if Path(self.model).exists() else self.model


def run_server(config: ServeConfig) -> int:
    """Serves until SIGTERM or Ctrl-C; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    bind(config.host, config.port, "port").close()  # better said before a model is loaded
    bind("127.0.0.1", config.admin_port, "admin_port").close()
    token, from_file = resolve_token(None, config.admin_token_file)
    if from_file:
        log.info("the admin token is in %s", config.admin_token_file)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    loaded = load_model(
        config.model,
        DTYPES[config.dtype],
        device=config.device,
        load_format=config.load_format,
        progress=_log_every("weights"),
    )
    engine = build_engine(
        loaded.llama, config.engine, model_name=config.model_name, progress=_log_every("CUDA graphs")
    )
    kernels = IMPLEMENTATION if config.device == "cpu" else f"triton {version('triton')}"
    registry = CollectorRegistry()
    info = {
        "version": version("kvpilot"),
        "torch": torch.__version__,
        "dtype": str(loaded.llama.dtype).removeprefix("torch."),
        "ladder": ",".join(config.engine.ladder),
        "page_size": str(config.engine.page_size),
        "eviction": config.engine.eviction,
        "kernels": kernels,
    }
    log.info("%s, %s, kernels: %s", config.model_name, info["dtype"], kernels)
    EngineCollector(engine.snapshot, model_name=config.model_name, info=info, registry=registry)
    server = ServerConfig(
        model_name=config.model_name,
        admin_token=token,
        host=config.host,
        port=config.port,
        admin_port=config.admin_port,
        record=config.record,
    )
    return serve(engine, loaded.tokenizer, metrics_source(registry), server)


def _log_every(what: str, seconds: float = 5.0) -> Callable[[int, int], None]:
    """Progress for a log: a line now and then, and none if it was quick."""
    last = time.monotonic()

    def log_progress(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            last = time.monotonic()
            log.info("%s: %d of %d", what, done, total)

    return log_progress
