"""`autotune knobs`: the four live knobs of a running engine."""

import json
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from kvpilot.engine.errors import ConfigError
from kvpilot.engine.server.token import DEFAULT_TOKEN_FILE

TokenFile = Annotated[Path, Option("--token-file", help="Holds the admin token of `autotune serve`.")]
AdminUrl = Annotated[str, Option("--admin-url", help="The engine's admin API.")]

app = typer.Typer(no_args_is_help=True, help="Read and write the four live knobs of a running engine.")


@app.command("get")
def knobs_get(
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
    admin_url: AdminUrl = "http://127.0.0.1:8001",
    as_json: Annotated[bool, Option("--json", help="For machines.")] = False,
) -> None:
    """Show the knobs, their bounds and the revision.

    autotune knobs get
    """
    from kvpilot.agent.knobs import get_knobs

    get_knobs(admin_url, token_file.expanduser(), as_json=as_json)


@app.command("set")
def knobs_set(
    settings: Annotated[
        list[str], typer.Argument(metavar="KNOB=VALUE...", help="e.g. max_batch=8 kv_level=1")
    ],
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
    admin_url: AdminUrl = "http://127.0.0.1:8001",
    expected_revision: Annotated[
        int | None, Option(help="Refuse if the knobs have changed since this revision.")
    ] = None,
) -> None:
    """Change knobs, all or none; each takes effect at the next scheduler step.

    autotune knobs set max_batch=8 kv_level=1
    """
    from kvpilot.agent.knobs import set_knobs

    set_knobs(admin_url, token_file.expanduser(), _parse_settings(settings), expected_revision)


def _parse_settings(settings: list[str]) -> dict[str, object]:
    changes: dict[str, object] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not (equals and value) or name in changes:
            raise ConfigError(f"{setting!r} is invalid: expected KNOB=VALUE, each knob once")
        try:
            changes[name] = json.loads(value)
        except json.JSONDecodeError:
            raise ConfigError(f"{name}={value!r} is invalid: expected a number") from None
    return changes
