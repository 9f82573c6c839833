"""Compiled twins of our own modules (see setup.py): loaded only while they are as new as their sources.

An edited source file must not be shadowed by what was compiled from it before: in a checkout, one source newer than
its twin turns all twins off, until `make compiled`. KVPILOT_COMPILED=0 turns them off everywhere.
"""

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:

    def mypyc_attr(**_: Any) -> Any:
        """Read by the compiler only, so that nothing more is needed to run the sources."""
        return lambda cls: cls


ROOT = Path(__file__).parents[1]
FOLDERS = ("engine", "engine/kv", "env/simulator")  # those with compiled modules


class SourceFinder(MetaPathFinder):
    """Finds the source of a kvpilot module before an extension of the same name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is None or not fullname.startswith("kvpilot."):
            return None
        source = Path(next(iter(path), "")) / f"{fullname.rpartition('.')[2]}.py"
        return spec_from_file_location(fullname, source) if source.exists() else None


def twins() -> dict[Path, Path]:
    """Compiled module of this Python by source file."""
    sources = [source for folder in FOLDERS for source in (ROOT / folder).glob("*.py")]
    pairs = {source: source.with_suffix(EXTENSION_SUFFIXES[0]) for source in sources}
    return {source: twin for source, twin in pairs.items() if twin.exists()}


def is_stale() -> bool:
    """A source was edited since. Installed files have no order in time, and nobody edits them."""
    if not (ROOT / "setup.py").exists():
        return False
    return any(source.stat().st_mtime > twin.stat().st_mtime for source, twin in twins().items())


def choose() -> None:
    """Sources or twins, once per process, before the first module that has both."""
    if os.environ.get("KVPILOT_COMPILED") == "0" or is_stale():
        sys.meta_path.insert(0, SourceFinder())


def is_in_use() -> bool:
    """The bookkeeping of this process is compiled."""
    from kvpilot.engine.kv import pool

    return not str(pool.__file__).endswith(".py")
