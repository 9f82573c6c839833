"""Worker processes that outlive the death of one of them, and go when asked to."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Generic, TypeVar

from kvpilot.agent.interrupt import without_interrupts
from kvpilot.engine.errors import KVPilotError

Item = TypeVar("Item")
Result = TypeVar("Result")
ATTEMPTS = 3  # of an item: a worker may have been killed for what another one needed
POLL_SECONDS = 0.2  # how soon a stop is noticed


class WorkerDiedError(KVPilotError):
    """Worker processes were killed again and again while they had this item: most likely memory is short."""


class JobError(KVPilotError):
    """What a job raised in its process, in words: errors with arguments of their own do not travel."""


class StoppedError(KVPilotError):
    """The work was stopped before its end."""


class Workers(Generic[Item, Result]):
    """Run `job` in `processes` processes, as a context manager. A killed worker's items are given to another."""

    def __init__(self, job: Callable[[Item], Result], processes: int) -> None:
        self._job = job
        self._processes = processes
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Workers[Item, Result]":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end()

    def run(
        self,
        items: Sequence[Item],
        *,
        on_done: Callable[[int, Result | KVPilotError], None] = lambda index, result: None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> list[Result | KVPilotError]:
        """Results in the order of `items`; JobError where the job raised an error of ours,
        WorkerDiedError where it killed its workers.

        Raises StoppedError once `is_stopped`; the workers are ended then, and what was under way is lost.
        """
        results: dict[int, Result | KVPilotError] = {}
        attempts = dict.fromkeys(range(len(items)), 0)
        while len(results) < len(items):
            todo = [index for index in attempts if index not in results]
            for index in todo:
                attempts[index] += 1
                if attempts[index] > ATTEMPTS:
                    results[index] = WorkerDiedError(
                        f"worker processes died {ATTEMPTS} times with {items[index]!r:.200}: memory may be short; "
                        "use fewer workers"
                    )
                    on_done(index, results[index])
            self._run_once(
                items, [index for index in todo if index not in results], results, on_done, is_stopped
            )
        return [results[index] for index in range(len(items))]

    def _run_once(
        self, items: Sequence[Item], todo: list[int], results: Any, on_done: Any, is_stopped: Any
    ) -> None:
        """Until all is done, or a worker died."""
        self._pool = self._pool or ProcessPoolExecutor(
            self._processes, multiprocessing.get_context("spawn"), _prepare_worker, (self._job,)
        )
        try:
            with without_interrupts():  # submitting is what starts processes
                pending: dict[Future[Result], int] = {self._pool.submit(_attempt, items[k]): k for k in todo}
            while pending:
                if is_stopped():
                    self._end()
                    raise StoppedError(f"stopped with {len(pending)} of {len(items)} runs to go")
                for future in wait(pending, POLL_SECONDS, FIRST_COMPLETED).done:
                    try:
                        result: Result | KVPilotError = future.result()
                    except KVPilotError as error:
                        result = error
                    index = pending.pop(future)
                    results[index] = result
                    on_done(index, result)
        except BrokenProcessPool:
            self._end()

    def _end(self) -> None:
        """At once: the executor itself only offers to wait for what is under way."""
        if self._pool is None:
            return
        for process in list((self._pool._processes or {}).values()):
            process.terminate()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool = None


# ---------------------------------------------------------------------- in the worker processes
_job: Callable[[Any], Any] | None = None  # sent once per process: it may hold a whole trace


def _attempt(item: Any) -> Any:
    assert _job is not None
    try:
        return _job(item)
    except KVPilotError as error:
        raise JobError(str(error)) from error


def _prepare_worker(job: Callable[[Any], Any]) -> None:
    global _job
    _job = job
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    os.environ.setdefault("OMP_NUM_THREADS", "1")
