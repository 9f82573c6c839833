"""`autotune tune`: runs the search, shows and writes what it found."""

from collections.abc import Mapping
from dataclasses import replace
from time import monotonic

from kvpilot.agent.interrupt import interruptible
from kvpilot.agent.jobs.sheet import Sheet, make_console, show_sheet
from kvpilot.agent.jobs.workers import StoppedError
from kvpilot.agent.progress import progress_bar
from kvpilot.agent.provenance import run_facts
from kvpilot.agent.tune.charts import write_page
from kvpilot.agent.tune.config import TuneConfig
from kvpilot.agent.tune.known import Tuning
from kvpilot.agent.tune.result import TunedResult
from kvpilot.agent.tune.storage import keeping
from kvpilot.agent.tune.tuning import Tuner, make_workers
from kvpilot.env.replay.report import format_seconds


def run_tune(config: TuneConfig) -> int:
    """Returns the exit code: 130 if it was interrupted; what is known then is written, and the studies go on."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    console, began, done = make_console(), monotonic(), 0
    with interruptible() as is_stopped, progress_bar("tuning", _num_trials(config), console) as advance:

        def on_trial() -> None:
            nonlocal done
            done += 1
            advance(done)

        with keeping(config.storage, str(config.cache)), make_workers(config) as workers:
            try:
                tuning = Tuner(config, workers, is_stopped=is_stopped, on_trial=on_trial).run()
            except StoppedError:
                tuning = None
    if tuning is None:
        console.print(f"stopped before a setting was known; the same command goes on from {config.storage}")
        return 130
    facts = {**run_facts(), "seconds": round(monotonic() - began, 1)}
    result = replace(tuning.result, provenance={**tuning.result.provenance, **facts})
    result.write(config.out)
    sheets = [scores_sheet(tuning), portfolio_sheet(result)]
    page = config.out.with_suffix(".html")
    write_page(result, tuning.studies, sheets, page)
    for sheet in sheets:
        show_sheet(sheet, console)
    console.print(f"rule: {rule_in_words(result)}")
    if not result.provenance["keeps_limits"]:
        console.print("[yellow]no setting keeps to the limits: the best one without them is shown[/]")
    if tuning.stopped:
        console.print(f"[yellow]{tuning.stopped}: this is what is known; the same command goes on[/]")
    console.print(f"{config.out} and {page}")
    return 130 if tuning.stopped else 0


def scores_sheet(tuning: Tuning) -> Sheet:
    """Per workload: default, the best for all, the best there, the rule."""
    names = ["default", "static-best", "hysteresis"]
    rows = []
    for family, scores in tuning.result.scores.items():
        row = [family]
        for name in names:
            figures = tuning.figures[family][name]
            row.append(f"{scores[name]:.3f} / {format_seconds(figures['latency_seconds'])}")
        rows.append([*row, f"{scores['static-best-here']:.3f}"])
    header = ["reward / latency", *names, "best there"]
    note = (
        "Mean reward and mean latency of an answer, on training data. `best there` is the best setting for each "
        "workload alone."
    )
    return Sheet("What it is worth", header, rows, note)


def portfolio_sheet(result: TunedResult) -> Sheet:
    rows = [
        [
            setting.name,
            f"{setting.knobs['kv_level']:g}",
            f"{setting.knobs['max_batch']:g}",
            f"{setting.knobs['size_factor']:.2f}",
            format_seconds(setting.knobs["ttl_seconds"]),
            setting.regime,
            f"{setting.score:.3f}",
        ]
        for setting in result.portfolio
    ]
    header = ["setting", "level", "batch", "size", "ttl", "best in", "reward there"]
    note = "Chosen greedily: each further one raises the mean of the best reward per stretch of traffic most."
    return Sheet("Portfolio", header, rows, note)


def rule_in_words(result: TunedResult) -> str:
    rule = result.hysteresis
    if rule.calm == rule.pressure:
        return "the static setting throughout: no switching was better"
    return f"{rule.signal} >= {rule.high:g}: {_short(rule.pressure)}; <= {rule.low:g}: {_short(rule.calm)}"


def _short(knobs: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in knobs.items())


def _num_trials(config: TuneConfig) -> int:
    several = len(config.workloads) if len(config.workloads) > 1 else 0
    return config.effort.trials + several * config.effort.regime_trials + config.effort.rule_trials
