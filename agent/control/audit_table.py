"""`autotune audit`: what was decided, why, and what became of it, as a table or as JSON lines."""

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvpilot.agent.control.audit import AuditLine, read_audit
from kvpilot.agent.control.replay import replay
from kvpilot.agent.counterfactual.loop import Question, in_words, traffic_in_words

DIFFERENCES_SHOWN = 20
STYLES = {
    "failed": "red",
    "stepped-back": "yellow",
    "applied": "green",
    "advised": "cyan",
    "control": "magenta",
}


@dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """Filters: empty ones let everything through."""

    file: Path
    outcomes: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    knobs: tuple[str, ...] = ()
    since: float | None = None  # Unix time
    last: int | None = None
    as_json: bool = False
    replay: bool = False


def run_audit(config: AuditConfig) -> int:
    """Returns the exit code: 1 if a replay takes another decision than the one on record."""
    torn: list[int] = []
    lines = list(read_audit(config.file, torn.append))
    console = Console(soft_wrap=not sys.stdout.isatty())
    for number in torn:
        print(f"autotune: line {number} of {config.file} is torn and left out", file=sys.stderr)
    if config.replay:
        return _replay(lines, console)
    chosen = [line for line in lines if _passes(line, config)]
    chosen = chosen[-config.last :] if config.last else chosen
    if config.as_json:
        for line in chosen:
            print(json.dumps(line.record))
        return 0
    console.print(table([line for line in chosen if line.kind != "counterfactual"]))
    console.print(summary(chosen))
    for line in chosen:
        if line.kind == "counterfactual":
            question = _question(line.record)
            traffic = traffic_in_words(line.record.get("traffic", "recorded"), line.record["result"])
            what = in_words(question, line.record["result"])
            console.print(f"{_clock(line.record)} counterfactual, {traffic}: {what}")
    return 0


def _replay(lines: list[AuditLine], console: Console) -> int:
    report = replay(lines)
    for difference in report.differences[:DIFFERENCES_SHOWN]:
        console.print(str(difference), markup=False)
    same = "all the same" if not report.differences else f"{len(report.differences)} differences"
    console.print(
        f"{report.decisions} decisions taken again: {same}; {report.skipped} records hold nothing to decide"
    )
    return 1 if report.differences else 0


def _passes(line: AuditLine, config: AuditConfig) -> bool:
    record = line.record
    if line.kind == "control":
        wanted = not config.outcomes or "control" in config.outcomes
        since = config.since is None or record["time"] >= config.since
        return wanted and since and not config.reasons and not config.knobs
    if line.kind == "counterfactual":
        wanted = not config.outcomes or "counterfactual" in config.outcomes
        since = config.since is None or record["time"] >= config.since
        touched = _question(record).changed
        return (
            wanted
            and since
            and not config.reasons
            and (not config.knobs or bool(touched & set(config.knobs)))
        )
    if line.kind != "decision":  # an intent's outcome is on record in the line after it
        return False
    reasons = {entry["reason"] for entry in record["constraints"]}
    touched = {*record["changes"], *record["wanted"], *(entry["knob"] for entry in record["constraints"])}
    return (
        (not config.outcomes or record["outcome"] in config.outcomes)
        and (not config.reasons or bool(reasons & set(config.reasons)))
        and (not config.knobs or bool(touched & set(config.knobs)))
        and (config.since is None or record["time"] >= config.since)
    )


def _question(record: dict[str, Any]) -> Question:
    return Question(record["present"], record["proposed"])


def table(lines: list[AuditLine]) -> Table:
    shown = Table()
    for heading in ("line", "time", "outcome", "knob", "was wanted", "became"):
        shown.add_column(heading, no_wrap=True)
    shown.add_column("why", min_width=24)
    for line in lines:
        rows = [_control_row(line.record)] if line.kind == "control" else list(_rows(line.record))
        outcome = line.record.get("outcome", line.kind)
        style = STYLES.get(outcome, "")
        for index, row in enumerate(rows):
            head = (str(line.number), _clock(line.record), outcome) if index == 0 else ("", "", "")
            shown.add_row(*head, *row, style=style, end_section=index == len(rows) - 1)
    return shown


def _rows(record: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """The whole decision first, then a row per knob: what was wanted, what is left, and what shrunk it."""
    constraints = record["constraints"]
    whole = "; ".join(_constraint(entry) for entry in constraints if entry["knob"] is None)
    policy = "the guard's own step back" if record["step_back"] else record["reason"]
    yield "", "", "", "; ".join(part for part in (policy, whole) if part)
    for name in dict.fromkeys([*record["wanted"], *record["changes"]]):
        why = "; ".join(_constraint(entry) for entry in constraints if entry["knob"] == name)
        became = record["changes"].get(name)
        yield name, record["wanted"].get(name, ""), "" if became is None else f"{became:g}", why
    for proposal in record["proposals"]:
        yield proposal["knob"], f"{proposal['value']:g}", "", f"for a human: {proposal['how']}"


def _control_row(record: dict[str, Any]) -> tuple[str, str, str, str]:
    """What may be done from here on."""
    acts = "decisions are written" if record["acts"] else "nothing is written"
    reasons = [f"{name}: {record[name]}" for name in ("killed", "hold") if record[name]]
    return "", "", "", "; ".join([f"mode {record['mode']}: {acts}", *reasons])


def _constraint(entry: dict[str, Any]) -> str:
    return f"{entry['reason']} ({entry['detail']})"


def _clock(record: dict[str, Any]) -> str:
    return time.strftime("%H:%M:%S", time.localtime(record["time"]))


def summary(lines: list[AuditLine]) -> str:
    kinds = Counter(line.kind for line in lines)
    others = ((kinds["control"], "changes of what may be done"), (kinds["counterfactual"], "counterfactuals"))
    beside = [f"{number} {name}" for number, name in others if number]
    if beside and not kinds["decision"]:
        return f"{', '.join(beside)}, 0 decisions."
    decided = [line.record for line in lines if line.kind == "decision"]
    outcomes = Counter(record["outcome"] for record in decided)
    reasons = Counter(entry["reason"] for record in decided for entry in record["constraints"])
    parts = [f"{number} {name}" for name, number in outcomes.most_common()]
    held = ", ".join(f"{name} {number}" for name, number in reasons.most_common())
    return " ".join(
        [
            f"{len(decided)} decisions: {', '.join(parts) or 'none'}. Held or shrunk by: {held or 'nothing'}.",
            *([f"Beside them {' and '.join(beside)}."] if beside else []),
        ]
    )
