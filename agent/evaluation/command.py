"""`autotune evaluate`: all policies on the same held-out episodes, and what may be said of it."""

import sys
from datetime import UTC, datetime
from importlib.metadata import version
from time import monotonic

from rich.console import Console

from kvpilot.agent.evaluation.config import EvaluateConfig
from kvpilot.agent.evaluation.outcome import Outcomes, collect
from kvpilot.agent.evaluation.report import write_report
from kvpilot.agent.evaluation.runs import KeepingJob, Run, run_all
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
from kvpilot.engine.errors import KVPilotError
from kvpilot.env.tuning.rollout import EpisodeResult


def run_evaluate(config: EvaluateConfig) -> int:
    """Returns the exit code: 130 if it was interrupted (what was run is kept), 1 if a policy could not be run."""
    console, began, done = make_console(), monotonic(), 0
    episodes = config.draw()
    runs = config.runs(episodes)
    with (
        interruptible() as is_stopped,
        progress_bar("evaluating", len({r.key for r in runs}), console) as advance,
    ):

        def on_done(index: int, outcome: object) -> None:
            nonlocal done
            done += 1
            advance(done)

        workers: Workers[Run, EpisodeResult] = Workers(KeepingJob(config.cache), config.workers)
        try:
            with workers:
                results = run_all(workers, runs, on_done=on_done, is_stopped=is_stopped)
        except StoppedError as error:
            console.print(
                f"[yellow]{error}; the same command goes on, what was run is kept in {config.cache}[/]"
            )
            return 130
    outcomes = collect(
        [episode.family for episode in episodes],
        [policy.label for policy in config.policies],
        results,
        lambda k: f"{episodes[k].family}, seed {episodes[k].seed}",
    )
    _check_baselines(outcomes)
    facts = {
        "label": config.label,
        "reward": config.weights.to_json(),
        "provenance": {
            "version": version("kvpilot"),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": " ".join(["autotune", *sys.argv[1:]]),
            "seconds": round(monotonic() - began, 1),
            "tuned": str(config.tuned),
        },
    }
    page = write_report(outcomes, config.policies, episodes, facts, config.out)
    _show(outcomes, console)
    console.print(f"{config.out} and {page}")
    return 1 if outcomes.failures else 0


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
