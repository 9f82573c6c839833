"""Which flags a command was given, for those that would be ignored."""

from collections.abc import Container

import typer


def given_flags(context: typer.Context, *, but: Container[str]) -> list[str]:
    """As written on the command line, without the parameters named in `but`."""
    flags = []
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name not in but and source is not None and source.name == "COMMANDLINE":
            flags.append(parameter.opts[0])
    return flags
