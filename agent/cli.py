"""The command `autotune`. Each command parses to a config and calls one function."""

import re
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer
from typer import Option

from kvpilot.agent import extras
from kvpilot.agent.commands import (
    audit,
    bench,
    calibrate,
    demo,
    evaluate,
    knobs,
    operator,
    replay,
    run,
    safe_mode,
    sensitivity,
    serve,
    trace,
    train,
    tune,
)
from kvpilot.engine.errors import InputError, KVPilotError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="""Serve a model from a quantized, paged KV cache, and tune that cache while it serves.

    New here? Watch it work, about 4 minutes on two cores:

        autotune demo

    By hand, in three terminals:

        autotune serve

        autotune knobs set kv_level=1

        autotune run --mode auto
    """,
)
# In the order of `autotune --help`.
for single in (
    serve,
    demo,
    run,
    audit,
    safe_mode,
    calibrate,
    replay,
    sensitivity,
    operator,
    tune,
    evaluate,
    train,
):
    single.register(app)
for group, name in ((knobs, "knobs"), (trace, "trace"), (bench, "bench")):
    app.add_typer(group.app, name=name)

OPTIONS = {  # of settings that errors call by another name than the option has
    "pool_bytes": "pool-mb",
    "ttl_seconds": "ttl",
    "fraction": "sample",
    "interval_seconds": "interval",
    "decision_seconds": "decision",
    "slo.ttft_p99_seconds": "slo-ttft",
    "slo.inter_token_p99_seconds": "slo-itl",
    "guard.min_change_seconds": "min-change-seconds",
    "prometheus.url": "prometheus-url",
    "counterfactual.trace": "counterfactual",
    "timeout_seconds": "timeout",
    "window_seconds": "window",
}


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"autotune {version('kvpilot')}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Errors that a user can cause are one line on stderr. Exit code 2: what was given cannot be used; 1: it failed."""
    try:
        app()
    except KVPilotError as error:
        print(f"autotune: {in_options(str(error), sys.argv[1:])}", file=sys.stderr)
        sys.exit(2 if isinstance(error, InputError) else 1)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("kvpilot"):
            raise
        print(f"autotune: {extras.missing_package(error.name, sys.argv[1:])}", file=sys.stderr)
        sys.exit(1)


def in_options(message: str, arguments: Sequence[str]) -> str:
    """A message that begins with a setting's name, with the option that set it; from a file it has none."""
    match = re.match(r"(?:knobs\.)?([\w.]+)=", message)
    if match is None:
        return message
    given = {argument.partition("=")[0] for argument in arguments}
    for name in (match[1].replace("_", "-"), OPTIONS.get(match[1])):
        if f"--{name}" in given:
            return f"--{name}: {message}"
    return message


if __name__ == "__main__":
    main()
