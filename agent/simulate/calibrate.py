"""`autotune calibrate`: measures steps of the real engine, fits, reports, writes a latency profile."""

import os
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from kvpilot.agent.interrupt import interruptible
from kvpilot.agent.progress import progress_bar
from kvpilot.agent.provenance import command_line
from kvpilot.engine.config import EngineConfig
from kvpilot.engine.errors import ConfigError, KVPilotError
from kvpilot.engine.factory import build_engine
from kvpilot.engine.kv.formats import PageShape
from kvpilot.engine.kv.quality import quality_loss
from kvpilot.engine.model.load import LoadedModel, load_model
from kvpilot.env.calibration.fit import Fit, fit_profile
from kvpilot.env.calibration.grid import GPU, GPU_QUICK, QUICK, Grid, GridRun
from kvpilot.env.calibration.measured import MeasuredEngine, MeasuredStep, StepLog, read_steps
from kvpilot.env.simulator.latency import ProfiledModel

PROGRESS_UNITS = 1000


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig:
    out: Path
    model: str
    name: str
    threads: int | None = None
    page_size: int = 32
    prefill_chunk: int | None = None
    device: str = "cpu"
    load_format: str = "auto"  # "dummy": random weights in the model's shape
    quick: bool = False
    note: str = ""
    fit_only: Path | None = None  # steps of an earlier run
    seed: int = 0

    @property
    def steps_path(self) -> Path:
        return self.out.with_suffix(".steps.jsonl")

    @property
    def grid(self) -> Grid:
        if self.device == "cuda":
            return GPU_QUICK if self.quick else GPU
        return QUICK if self.quick else Grid()

    @property
    def chunk(self) -> int:
        """Prompt tokens per step: what was asked for, or the longest of the grid."""
        return self.prefill_chunk or max(self.grid.chunks)

    def envelope(self, shape: PageShape) -> EngineConfig:
        return self.grid.envelope(shape, EngineConfig().ladder, self.chunk)


def run_calibration(config: CalibrateConfig) -> int:
    """Returns the exit code: 130 if it was interrupted, and then no profile was written."""
    console = Console()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    steps = None if config.fit_only is None else _earlier_steps(config.fit_only)
    loaded = load_model(config.model, device=config.device, load_format=config.load_format)
    if steps is None:
        finished, steps = _measure(config, loaded, console)
        if not finished:
            console.print(
                f"[yellow]interrupted: {len(steps)} steps are in {config.steps_path}, no profile written[/]"
            )
            return 130
    fit = _fit(config, loaded, steps)
    fit.profile.write(config.out)
    _show(fit, len(steps), console)
    console.print(f"{config.out}: use it with `autotune replay TRACE --profile {config.out}`")
    return 0


def _measure(
    config: CalibrateConfig, loaded: LoadedModel, console: Console
) -> tuple[bool, list[MeasuredStep]]:
    """Whether the grid was finished, and what was measured."""
    envelope = config.envelope(_shape(loaded, config.page_size))
    engine = build_engine(loaded.llama, envelope, engine_class=MeasuredEngine)
    assert isinstance(engine, MeasuredEngine)
    log = StepLog(config.steps_path)
    try:
        with (
            interruptible() as is_stopped,
            progress_bar("measuring", PROGRESS_UNITS, console) as advance,
        ):
            run = GridRun(
                engine,
                config.grid,
                loaded.tokenizer.vocab_size,
                config.seed,
                lambda share: advance(int(PROGRESS_UNITS * share)),
            )
            for step in run.steps():
                log.add(step)
                if is_stopped():
                    return False, log.steps
    finally:
        log.close()
    return True, log.steps


def _earlier_steps(path: Path) -> list[MeasuredStep]:
    try:
        steps = read_steps(path)
    except OSError as error:
        raise ConfigError(f"fit_only={str(path)!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"fit_only={str(path)!r} is invalid: expected measured steps, not binary") from None
    if not steps:
        raise ConfigError(f"fit_only={str(path)!r} is invalid: it holds no steps")
    return steps


def _fit(config: CalibrateConfig, loaded: LoadedModel, steps: list[MeasuredStep]) -> Fit:
    model = loaded.config
    ladder = EngineConfig().ladder
    known = config.envelope(_shape(loaded, config.page_size)) if config.device == "cuda" else EngineConfig()
    if steps and len(steps[0].features.kv_bytes) != len(ladder):
        raise KVPilotError(
            f"the steps are of a ladder of {len(steps[0].features.kv_bytes)} levels: expected {ladder}"
        )
    shape = _shape(loaded, config.page_size)
    return fit_profile(
        steps,
        ladder,
        name=config.name,
        model=ProfiledModel(
            name=Path(config.model).name if Path(config.model).exists() else config.model,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            max_len=model.max_position,
        ),
        engine={
            "pool_bytes": known.pool_bytes,
            "page_size": config.page_size,
            "prefill_chunk": config.chunk,
            "max_batch_ceiling": known.max_batch_ceiling,
        },
        quality_loss=dict(quality_loss(config.model)),
        origin=_origin(config, loaded, len(steps)),
    )


def _shape(loaded: LoadedModel, page_size: int) -> PageShape:
    model = loaded.config
    return PageShape(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        page_size=page_size,
    )


def _origin(config: CalibrateConfig, loaded: LoadedModel, num_steps: int) -> dict[str, object]:
    return {
        "calibrated": True,
        "machine": f"{_gpu(config.device)}{_processor()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "dtype": str(loaded.llama.dtype).removeprefix("torch."),
        "versions": {
            "kvpilot": version("kvpilot"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(),
        "steps": num_steps,
        "grid": asdict(config.grid),
        **({"note": config.note} if config.note else {}),
    }


def _gpu(device: str) -> str:
    return f"{torch.cuda.get_device_name()}, " if device == "cuda" else ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _show(fit: Fit, num_steps: int, console: Console) -> None:
    table = Table("held-out steps", "number", "median error", "90 % within", "bias")
    for column in table.columns[1:]:
        column.justify = "right"
    for kind, error in fit.errors.items():
        shares = [f"{100 * value:.1f} %" for value in (error.median, error.p90)]
        table.add_row(kind, str(error.count), *shares, f"{100 * error.bias:+.1f} %")
    console.print(table)
    console.print(
        f"fitted to {num_steps} steps; {fit.num_outliers} took more than 1.5 times what the fit says"
    )
