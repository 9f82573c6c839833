"""Writing traces."""

from collections.abc import Iterable
from pathlib import Path

from kvpilot.engine.files import whole_file
from kvpilot.env.traces.own_jsonl import write_own_jsonl
from kvpilot.env.traces.parquet import write_parquet
from kvpilot.env.traces.trace import Trace, TraceError

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.xz", ".parquet")


def write_trace(trace: Trace, path: Path | str) -> None:
    """By the name: .parquet, or .jsonl with .gz or .xz. Whole or not at all."""
    path = Path(path)
    check_output(path)
    try:
        with whole_file(path) as temporary:
            (write_parquet if path.suffix == ".parquet" else write_own_jsonl)(trace, temporary)
    except OSError as error:
        raise TraceError(f"{path}: cannot be written: {error.strerror or error}") from error


def check_output(path: Path) -> None:
    """Raise TraceError for a name that says no format, before long work."""
    if not path.name.endswith(SUFFIXES):
        raise TraceError(
            f"output={str(path)!r} is invalid: expected a name that ends in {', '.join(SUFFIXES)}"
        )
    if not path.parent.is_dir():
        raise TraceError(f"output={str(path)!r} is invalid: there is no folder {path.parent}")


def check_target(path: Path, inputs: Iterable[Path]) -> None:
    """Raise TraceError where writing would overwrite what is read, or a folder."""
    if path.is_dir():
        raise TraceError(f"{path}: is a folder: expected the name of a file to write")
    for source in inputs:
        if path.exists() and source.exists() and path.samefile(source):
            raise TraceError(
                f"{path}: is the same file as the source {source}: expected another name to write to"
            )
