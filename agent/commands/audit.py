"""`autotune audit`."""

import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from kvpilot.engine.errors import ConfigError


def register(app: typer.Typer) -> None:
    app.command()(audit)


def audit(
    file: Annotated[Path, Argument(help="What `autotune run --audit` wrote.")],
    outcome: Annotated[
        list[str] | None, Option(help="Only these: applied, held, stepped-back, ...; may be repeated.")
    ] = None,
    reason: Annotated[
        list[str] | None, Option(help="Only what this held or shrunk: step, slo-violated, ...")
    ] = None,
    knob: Annotated[list[str] | None, Option(help="Only decisions about this knob.")] = None,
    since: Annotated[
        str | None, Option(metavar="MINUTES | DATE", help="Minutes ago, or 2026-01-31T12:00:00 (local time).")
    ] = None,
    last: Annotated[int | None, Option(min=1, help="Only so many, the newest.")] = None,
    as_json: Annotated[bool, Option("--json", help="The records as they are.")] = False,
    replay: Annotated[
        bool, Option("--replay", help="Take every decision again and compare; exit code 1 if one differs.")
    ] = False,
) -> None:
    """Explain the decisions of a log: what was wanted, what was written, and what held or shrunk it.

    autotune audit autotune-audit.jsonl --knob kv_level --last 20

    autotune audit autotune-audit.jsonl --replay
    """
    from kvpilot.agent.control.audit_table import AuditConfig, run_audit

    config = AuditConfig(
        file=file,
        outcomes=tuple(outcome or ()),
        reasons=tuple(reason or ()),
        knobs=tuple(knob or ()),
        since=_moment(since),
        last=last,
        as_json=as_json,
        replay=replay,
    )
    raise typer.Exit(run_audit(config))


def _moment(since: str | None) -> float | None:
    """Unix time."""
    if since is None:
        return None
    with suppress(ValueError):
        return time.time() - 60 * float(since)
    try:
        return datetime.fromisoformat(since).timestamp()
    except ValueError:
        raise ConfigError(f"since={since!r} is invalid: expected minutes, or 2026-01-31T12:00:00") from None
