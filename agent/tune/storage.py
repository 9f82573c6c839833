"""Where studies are kept, so that they can be taken up again, here or by several machines together."""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvpilot.engine.errors import ConfigError, InputError, KVPilotError

if TYPE_CHECKING:
    import optuna

Direction = Literal["maximize", "minimize"]
FORM = 1  # rises when trials of older studies would mean something else
FORM_ATTRIBUTE, INPUTS_ATTRIBUTE, WORKER_ATTRIBUTE = "kvpilot_study", "inputs", "worker"
JOURNAL_SUFFIXES = (".journal", ".jsonl", ".log")


class StudyError(InputError):
    """A study cannot be read, or is not one of this version and these inputs."""


def open_storage(spec: str) -> "optuna.storages.BaseStorage":
    """A database URL (`postgresql://...`), a journal file (.journal, .jsonl, .log), or a SQLite file (all else)."""
    import optuna
    from optuna.storages.journal import JournalFileBackend
    from sqlalchemy.exc import SQLAlchemyError

    try:
        if "://" in spec:
            return optuna.storages.RDBStorage(spec)
        path = Path(spec)
        if not path.parent.is_dir():
            raise ConfigError(f"storage={spec!r} is invalid: there is no folder {path.parent}")
        if path.suffix in JOURNAL_SUFFIXES:
            backend = JournalFileBackend(spec)
            return optuna.storages.JournalStorage(backend)
        return optuna.storages.RDBStorage(
            f"sqlite:///{path}", engine_kwargs={"connect_args": {"timeout": 60}}
        )
    except (SQLAlchemyError, ImportError, OSError, ValueError, RuntimeError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        why = str(error).partition("\n")[0]  # SQLAlchemy adds the statement and a link
        raise StudyError(f"storage {spec!r} cannot be used: {why}") from error


@contextmanager
def keeping(*places: str) -> Iterator[None]:
    """Long work on a study, kept in `places`: what cannot be written there any more, in words. Raises KVPilotError."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (StorageInternalError, SQLAlchemyError, OSError) as error:
        cause = error.__cause__ if isinstance(error, StorageInternalError) else error
        why = getattr(cause, "orig", None) or getattr(cause, "strerror", None) or cause
        raise KVPilotError(
            f"{' or '.join(places)} cannot be written: {why}; what is done is kept, the same command goes on"
        ) from error


def open_study(
    storage: "optuna.storages.BaseStorage",
    name: str,
    directions: Sequence[Direction],
    inputs: Mapping[str, Any],
) -> "optuna.Study":
    """The study of this name, new or taken up again.

    `inputs` says what its values are comparable for: workloads, seeds, reward. Raises StudyError where an old study
    was made from other inputs, or by a version whose trials mean something else.
    """
    import optuna

    study = optuna.create_study(storage=storage, study_name=name, directions=directions, load_if_exists=True)
    remedy = "name another study (--study) or another storage (--storage)"
    if not study.user_attrs and not study.get_trials(deepcopy=False):
        study.set_user_attr(FORM_ATTRIBUTE, FORM)
        study.set_user_attr(INPUTS_ATTRIBUTE, dict(inputs))
        return study
    form = study.user_attrs.get(FORM_ATTRIBUTE)
    if form != FORM:
        raise StudyError(
            f"study {name!r}: {FORM_ATTRIBUTE}={form!r} is of another version, expected {FORM}: {remedy}"
        )
    old = study.user_attrs.get(INPUTS_ATTRIBUTE, {})
    changed = sorted(key for key in {*old, *inputs} if old.get(key) != inputs.get(key))
    if changed or [direction.name.lower() for direction in study.directions] != list(directions):
        what = ", ".join(changed) or "directions"
        raise StudyError(f"study {name!r} was made with other {what}: {remedy}")
    return study


def take_back_lost(study: "optuna.Study") -> int:
    """Trials that a process on this machine left when it was killed: told as failed, and queued again."""
    import optuna

    lost = 0
    for trial in study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
        host, _, process = str(trial.user_attrs.get(WORKER_ATTRIBUTE, "")).rpartition(":")
        if host == socket.gethostname() and not _is_alive(int(process)):
            give_back(study, trial.number, trial.params)
            lost += 1
    return lost


def give_back(study: "optuna.Study", number: int, params: Mapping[str, Any]) -> None:
    """A trial that was not finished: failed, and its parameters queued for another."""
    import optuna

    study.tell(number, state=optuna.trial.TrialState.FAIL, skip_if_finished=True)
    if params:
        study.enqueue_trial(dict(params))


def claim(trial: "optuna.Trial") -> None:
    """Notes who works on it."""
    trial.set_user_attr(WORKER_ATTRIBUTE, f"{socket.gethostname()}:{os.getpid()}")


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
