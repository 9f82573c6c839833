"""Files that are there whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

from kvpilot.engine.errors import KVPilotError


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name beside `path`, with its suffix, to write to: what is there at the end takes the place of `path`.

    After an error nothing of it is left and `path` is as it was. Several processes may write the same file.
    Raises OSError.
    """
    temporary = path.with_name(f".{token_hex(4)}.{path.name}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """`content` (text as UTF-8) in the place of what `path` held. Raises OSError."""
    with whole_file(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def save(path: Path, content: str | bytes) -> None:
    """`write_whole`, in a folder that is made if there is none. Raises KVPilotError that names the file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except OSError as error:
        raise KVPilotError(f"{path} cannot be written: {error.strerror}") from error
