"""The names of a trace's settings: what an error says, its key in a spec file, its flag."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

SAME = (
    *("format", "sessions_per_second", "block_size", "combine", "switch_seconds", "window"),
    *("max_tokens", "max_prompt_tokens", "max_output_tokens"),
)
KEYS = {name: name for name in SAME} | {  # what an error may call a setting, and its key in a spec
    "factor": "scale",
    "fraction": "sample",
    "divisor": "shrink",
    "at_seconds": "switch_seconds",
    "num_requests": "requests",
}
FLAGS = {
    "sessions_per_second": "session-rate",
    "switch_seconds": "switch-at",
}  # where not the same as the key


def flag(key: str) -> str:
    return "--" + FLAGS.get(key, key).replace("_", "-")


@contextmanager
def named_as(name_of: Callable[[str], str]) -> Iterator[None]:
    """A setting that an error begins with is called as `name_of` its key in a spec."""
    from kvpilot.env.traces.trace import TraceError

    try:
        yield
    except TraceError as error:
        name, equals, rest = str(error).partition("=")
        if name not in KEYS:
            raise
        raise TraceError(name_of(KEYS[name]) + equals + rest) from error
