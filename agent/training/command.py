"""`autotune train`: says what is done, and what came of it."""

import fcntl
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table

from kvpilot.agent.evaluation.runs import check_sessions
from kvpilot.agent.interrupt import interruptible
from kvpilot.agent.jobs.sheet import make_console
from kvpilot.agent.jobs.workers import StoppedError
from kvpilot.agent.training.errors import FolderError, TrainingError
from kvpilot.agent.training.request import TrainRequest
from kvpilot.agent.training.screen import Screen
from kvpilot.agent.training.training import Trained, open_folder, train
from kvpilot.agent.tune.storage import keeping

LOCK = ".lock"


def run_train(request: TrainRequest, *, resume: bool) -> int:
    """Returns the exit code: 130 if it was interrupted; the best so far is exported then, and --resume goes on."""
    import torch

    torch.set_num_threads(1)  # networks this small are slower on several
    console = make_console()
    check_folder(request.out)
    check_sessions(request.episodes_of_each())
    with only_one(request.out), interruptible() as is_stopped:
        try:
            open_folder(request, resume=resume)
            done = train(request, Screen(console), is_stopped)
        except StoppedError as error:
            console.print(f"{error}; go on with --resume")
            return 130
        except OSError as error:
            where = error.filename or request.out
            raise TrainingError(
                f"{where} cannot be written: {error.strerror}; then go on with --resume"
            ) from error
    console.print(_table(done))
    console.print(_verdict(done), highlight=False)
    if done.is_complete:
        return 0
    console.print("[yellow]stopped: this is the best so far; go on with --resume[/]")
    return 130


def run_search(request: TrainRequest, trials: int) -> int:
    """Returns the exit code."""
    import optuna
    import torch

    from kvpilot.agent.training.search import search

    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    console = make_console()
    check_folder(request.out)
    check_sessions(request.episodes_of_each())
    with only_one(request.out), interruptible() as is_stopped:
        try:
            with keeping(str(request.out)):
                path, reward = search(request, trials, Screen(console), is_stopped)
        except StoppedError as error:
            console.print(f"{error}; the same command goes on")
            return 130
        except TrainingError as error:
            raise TrainingError(f"{error}; trials done so far are kept: the same command goes on") from error
    console.print(f"best validation reward {reward:.4f}: {path}; train with --config {path}", highlight=False)
    return 130 if is_stopped() else os.EX_OK


@contextmanager
def only_one(out: Path) -> Iterator[None]:
    """Of all trainings in this folder; whatever ends the process lets go. Raises FolderError."""
    with (out / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FolderError(
                f"{out} is in use by another training: stop it, or name another --out"
            ) from error
        yield


def check_folder(out: Path) -> None:
    """Makes it if there is none. Raises FolderError where nothing can be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FolderError(f"{out} cannot be written: {error.strerror}; name another --out") from error
    if not os.access(out, os.W_OK):
        raise FolderError(f"{out} cannot be written: no permission; name another --out")


def _table(done: Trained) -> Table:
    """A column per policy: names of workloads are long, numbers are not."""
    columns: dict[str, Any] = {
        **done.baselines,
        **{f"seed {seed}": point for seed, point in done.best.items()},
    }
    if done.joined:
        columns["seeds joined"] = done.joined
    names = [f"[bold]{name}[/]" if score is done.score else name for name, score in columns.items()]
    table = Table("validation reward", *names, title="What was learned")
    for workload in done.score.by_workload:
        table.add_row(workload, *(f"{score.by_workload[workload]:.3f}" for score in columns.values()))
    table.add_row("mean", *(f"[bold]{score.reward:.4f}[/]" for score in columns.values()))
    table.add_row("knob changes an hour", *(f"{score.changes_per_hour:.1f}" for score in columns.values()))
    table.add_row("steps of PPO", *(str(getattr(score, "steps", "")) for score in columns.values()))
    return table


def _verdict(done: Trained) -> str:
    best_other = max(score.reward for score in done.baselines.values())
    gain = done.score.reward - best_other
    seeds = [point.reward for point in done.best.values()]
    spread = f"; seeds reach {min(seeds):.4f} to {max(seeds):.4f}" if len(seeds) > 1 else ""
    learned = f"{gain:+.4f} over the better of static-best and rule{spread}"
    warning = "" if gain > 0 else ": nothing was won by learning here"
    return f"{learned}{warning}. Judge it on other episodes with `autotune evaluate`.\n{done.policy}"
