"""What must outlive the process: the latch of safe mode, the reverts that lead to it, and the change on trial."""

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from kvpilot.agent.guard import Watch
from kvpilot.engine.errors import InputError
from kvpilot.engine.files import whole_file


class StateError(InputError):
    """The state file cannot be read or written; the message says why and what to do."""


class SafeState(NamedTuple):
    safe_mode: str = ""  # why it is latched; empty: it is not
    reverts: tuple[float, ...] = ()  # Unix times
    trial: Watch | None = None  # or a crash in the settle time would leave a bad change in force


class StateFile:
    """Read at every decision, so that another process (`autotune safe-mode`) can release the latch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> SafeState:
        """No file: nothing is latched. StateError for one that cannot be understood: then nothing may be done."""
        try:
            values = json.loads(self.path.read_text(encoding="utf-8"))
            reverts = tuple(float(when) for when in values["reverts"])
            trial = None if values.get("trial") is None else Watch.from_dict(values["trial"])
            if not isinstance(values["safe_mode"], str) or not all(map(math.isfinite, reverts)):
                raise TypeError("values of another kind")
        except FileNotFoundError:
            return SafeState()
        except OSError as error:
            raise StateError(f"state={str(self.path)!r} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateError(
                f"state={str(self.path)!r} is not a state file ({error}): remove it to start anew"
            ) from error
        return SafeState(values["safe_mode"], reverts, trial)

    def write(self, state: SafeState) -> None:
        """Whole or not at all."""
        try:
            with whole_file(self.path) as temporary, temporary.open("w", encoding="utf-8") as file:
                trial = None if state.trial is None else asdict(state.trial)
                file.write(json.dumps({**state._asdict(), "trial": trial}) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StateError(f"state={str(self.path)!r} cannot be written: {error.strerror}") from error

    def check(self) -> None:
        """Raises StateError before the loop starts if a latch could not be written."""
        self.write(self.read())
