"""What each candidate would bring, from the present state on: every one is tried in a forked copy of the process."""

import os
import pickle
from collections.abc import Mapping, Sequence

from kvpilot.engine.errors import KVPilotError
from kvpilot.env.tuning.run import EpisodeRun


class LookaheadError(KVPilotError):
    """A forked look-ahead ended without an answer."""


def lookahead(
    run: EpisodeRun, settings: Sequence[Mapping[str, object]], seconds: float, *, processes: int = 2
) -> list[float]:
    """Mean reward over `seconds` (at least one window) if these knobs were set now and kept; simulation only.

    `run` stays where it is. At most `processes` copies live at a time. Raises LookaheadError where a copy dies.
    """
    windows = max(1, round(seconds / run.interval_seconds))
    values: list[float] = []
    for first in range(0, len(settings), processes):
        children = [_fork(run, changes, windows) for changes in settings[first : first + processes]]
        values += [_collect(pid, pipe) for pid, pipe in children]
    return values


def _fork(run: EpisodeRun, changes: Mapping[str, object], windows: int) -> tuple[int, int]:
    """Process and the end of the pipe to read from."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    answer: object = None
    try:
        answer = run.step(changes, windows).reward
    except BaseException as error:  # noqa: BLE001 - the child's outermost frame: told to the parent, then _exit
        answer = f"{type(error).__name__}: {error}"
    finally:
        os.write(writing, pickle.dumps(answer))
        os._exit(0)  # no handlers, buffers or finalizers of the parent


def _collect(pid: int, pipe: int) -> float:
    with os.fdopen(pipe, "rb") as stream:
        text = stream.read()
    os.waitpid(pid, 0)
    answer = pickle.loads(text) if text else "it was killed"
    if not isinstance(answer, float):
        raise LookaheadError(f"a look-ahead failed: {answer}")
    return answer
