"""The part of the guard's memory that outlives the process, kept in step with its file."""

import logging
from dataclasses import replace

from kvpilot.agent.control.nouns import Inputs
from kvpilot.agent.control.state import SafeState, StateError, StateFile
from kvpilot.agent.guard import GuardLimits, Memory
from kvpilot.agent.guard.review import resume

log = logging.getLogger("kvpilot.agent")


class Latch:
    """Safe mode, reverts, and the change on trial. Without a file they end with the process."""

    def __init__(self, file: StateFile | None) -> None:
        self._file = file
        self._has_begun = False
        self._unwritten: SafeState | None = None
        self.problem = ""  # why the file lacks what is in memory: nothing new may be tried then

    def recall(self, memory: Memory, inputs: Inputs, limits: GuardLimits) -> Memory:
        """The memory with what the file says: another process may have released the latch. Raises StateError."""
        if self._file is None:
            return memory
        if self._unwritten is not None and not self._write(self._file, self._unwritten):
            return memory  # what the file says is older
        saved = self._file.read()
        memory = replace(memory, safe_mode=saved.safe_mode, reverts=saved.reverts)
        begins, self._has_begun = not self._has_begun, True
        if not begins or saved.trial is None:
            return memory
        knobs, now, unix_time = inputs.state.requested, inputs.now, inputs.unix_time
        return resume(memory, saved.trial, knobs, now=now, unix_time=unix_time, limits=limits)

    def keep(self, memory: Memory) -> None:
        """Writes what has changed; what could not be written counts all the same, and `problem` says why."""
        if self._file is None:
            return
        safe = SafeState(memory.safe_mode, memory.reverts, memory.watch)
        try:
            is_news = self._unwritten is not None or safe != self._file.read()
        except StateError:
            return  # `recall` has said so and holds
        if is_news:
            self._write(self._file, safe)

    def _write(self, file: StateFile, safe: SafeState) -> bool:
        try:
            file.write(safe)
        except StateError as error:
            log.error("%s", error)
            self._unwritten, self.problem = safe, str(error)
            return False
        self._unwritten, self.problem = None, ""
        return True
