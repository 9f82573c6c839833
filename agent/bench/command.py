"""`autotune bench`: measurements that a user may repeat, with their results for a terminal and as JSON."""

import ctypes
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from kvpilot.agent.bench import quality
from kvpilot.agent.progress import progress_bar
from kvpilot.engine.errors import ConfigError
from kvpilot.engine.model.load import load_model

QUICK_WINDOWS = 2
M_MMAP_THRESHOLD = -3  # of malloc.h


@dataclass(frozen=True, kw_only=True)
class QualityConfig:
    """What `autotune bench quality` does."""

    model: str = "smollm2"
    num_windows: int = 16  # of 2,048 tokens, prose and code in turn
    quick: bool = False  # two windows, and only what the engine ships
    threads: int | None = None
    json_path: Path | None = None
    table_path: Path | None = None  # of kv/quality.json, to merge the mean KL per codec into

    @property
    def command(self) -> str:
        return (
            f"autotune bench quality --model {self.model} --windows {self.num_windows}"
            + " --quick" * self.quick
        )


def run_quality(config: QualityConfig) -> int:
    """Measures, prints, writes what was asked for; the exit code."""
    for path in filter(None, (config.json_path, config.table_path)):
        if not path.parent.is_dir():
            raise ConfigError(f"{path} cannot be written: expected an existing folder, {path.parent} is none")
    _map_large_blocks()
    if config.threads:
        torch.set_num_threads(config.threads)
    recipes = quality.SHIPPED if config.quick else (*quality.SHIPPED, *quality.INGREDIENTS)
    num_windows = min(config.num_windows, QUICK_WINDOWS) if config.quick else config.num_windows
    model = load_model(config.model, torch.float32)
    label = f"percent of {len(recipes)} recipes on {num_windows} windows"
    with progress_bar(label, 100, Console(stderr=True)) as advance:
        report = quality.run(
            model, recipes, num_windows=num_windows, on_progress=lambda share: advance(round(100 * share))
        )
    Console().print(quality.table(report))
    about = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "command": config.command}
    if config.json_path:
        config.json_path.write_text(json.dumps(about | report.as_dict(), indent=1) + "\n")
    if config.table_path:
        merge_table(config.table_path, config.model, about, report)
    return 0


def _map_large_blocks() -> None:
    """Have glibc map blocks from 1 MiB on and return them when freed. Its threshold otherwise rises to the size of
    the logits, and a heap of ever growing K and V fragments until it is ten times what is in use."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 20)


def merge_table(path: Path, model: str, about: dict[str, str], report: quality.QualityReport) -> None:
    """Sets this model's entry in the table behind the gauge `kv_quality_loss`: the first recipe of each codec."""
    table = json.loads(path.read_text()) if path.exists() else {"models": {}}
    kl_mean: dict[str, float] = {}
    for row in report.recipes:
        kl_mean.setdefault(row.codec, float(f"{row.kl_mean:.3g}"))
    table["models"][model] = about | {"kl_mean": kl_mean}
    path.write_text(json.dumps(table, indent=1) + "\n")
