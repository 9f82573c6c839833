"""`autotune evaluate`: all policies on the same held-out episodes, and what may be said of it."""

import itertools
from time import monotonic
from typing import Any

from rich.console import Console

from kvpilot.agent.evaluation.config import EvaluateConfig
from kvpilot.agent.evaluation.outcome import Outcomes, collect
from kvpilot.agent.evaluation.report import write_report
from kvpilot.agent.evaluation.runs import KeepingJob, Outcome, Run, check_sessions, run_all
from kvpilot.agent.evaluation.sheets import (
    differences_sheet,
    learned_labels,
    rewards_sheet,
    sentences,
    tuning_sheet,
)
from kvpilot.agent.interrupt import interruptible
from kvpilot.agent.jobs.sheet import make_console, show_sheet
from kvpilot.agent.jobs.workers import StoppedError, Workers
from kvpilot.agent.progress import progress_bar
from kvpilot.agent.provenance import run_facts
from kvpilot.engine.errors import KVPilotError
from kvpilot.env.tuning.rollout import EpisodeResult


def run_evaluate(config: EvaluateConfig) -> int:
    """Returns the exit code: 130 if it was interrupted (what was run is kept), 1 if a policy could not be run."""
    console, began = make_console(), monotonic()
    episodes = config.draw()
    check_sessions(episodes)
    try:
        results = _run(config, config.runs(episodes), console)
    except StoppedError as error:
        kept = f"the same command goes on, what was run is kept in {config.cache}"
        console.print(f"[yellow]{error}; {kept}[/]")
        return 130
    except OSError as error:
        raise KVPilotError(
            f"{config.cache} cannot be written: {error.strerror}; what was run is kept, the same command goes on"
        ) from error
    outcomes = collect(
        [episode.family for episode in episodes],
        [policy.label for policy in config.policies],
        results,
        lambda k: f"{episodes[k].family}, seed {episodes[k].seed}",
    )
    _check_baselines(outcomes)
    facts = _facts(config, seconds=monotonic() - began)
    page = write_report(outcomes, config.policies, episodes, facts, config.out)
    _show(outcomes, console)
    console.print(f"{config.out} and {page}")
    return 1 if outcomes.failures else 0


def _run(config: EvaluateConfig, runs: list[Run], console: Console) -> list[Outcome]:
    workers: Workers[Run, EpisodeResult] = Workers(KeepingJob(config.cache), config.workers)
    num_runs, count = len({run.key for run in runs}), itertools.count(1)
    with interruptible() as is_stopped, progress_bar("evaluating", num_runs, console) as advance, workers:
        return run_all(workers, runs, on_done=lambda *_: advance(next(count)), is_stopped=is_stopped)


def _facts(config: EvaluateConfig, *, seconds: float) -> dict[str, Any]:
    return {
        "label": config.label,
        "reward": config.weights.to_json(),
        "provenance": {
            **run_facts(),
            "seconds": round(seconds, 1),
            "tuned": str(config.tuned),
        },
    }


def _check_baselines(outcomes: Outcomes) -> None:
    for name in ("default", "static-best"):
        if name in outcomes.failures:
            raise KVPilotError(f"{name} could not be run, nothing can be compared: {outcomes.failures[name]}")


def _show(outcomes: Outcomes, console: Console) -> None:
    sheets = [tuning_sheet(outcomes), rewards_sheet(outcomes)]
    sheets += [differences_sheet(outcomes, label) for label in learned_labels(outcomes) or ["hysteresis"]
               if label in outcomes.labels]  # fmt: skip
    for sheet in sheets:
        show_sheet(sheet, console)
    for sentence in sentences(outcomes):
        console.print(sentence)
    for label, why in outcomes.failures.items():
        console.print(f"[red]{label} could not be run and is left out: {why}[/]")
