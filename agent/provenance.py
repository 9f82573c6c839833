"""What every result says of how it came about."""

import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import version


def command_line() -> str:
    """This run's, to be given again."""
    return shlex.join(["autotune", *sys.argv[1:]])


def run_facts() -> dict[str, str]:
    """`version`, `date` and `command`."""
    return {
        "version": version("kvpilot"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(),
    }
