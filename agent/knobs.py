"""`autotune knobs`: the admin API for people."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvpilot.agent.control.client import EngineClient, KnobState, read_token


def get_knobs(admin_url: str, token_file: Path, *, as_json: bool) -> None:
    state = _client(admin_url, token_file).knobs()
    if as_json:
        print(json.dumps(asdict(state)))
    else:
        _print(state)


def set_knobs(
    admin_url: str, token_file: Path, changes: Mapping[str, object], expected_revision: int | None
) -> None:
    client = _client(admin_url, token_file)
    result = client.patch(changes, expected_revision)
    for name, outcome in result.results.items():
        print(f"{name}: {outcome}")
    _print(client.knobs())


def _client(admin_url: str, token_file: Path) -> EngineClient:
    return EngineClient(url=admin_url, admin_url=admin_url, token=read_token(token_file))


def _print(state: KnobState) -> None:
    table = Table(title=f"revision {state.revision}", title_justify="left")
    for heading in ("knob", "effective", "requested", "bounds", "class"):
        table.add_column(heading)
    for name, value in state.effective.items():
        requested = f"{state.requested[name]:g}" if name in state.pending else ""
        table.add_row(name, f"{value:g}", requested, str(state.bounds[name]), state.classes[name])
    Console().print(table)
