"""Compiled twins of modules must never stand in for sources that were edited since."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvpilot.engine import compiled


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "engine"
    folder.mkdir()
    (tmp_path / "setup.py").touch()
    (folder / "a.py").touch()
    (folder / "b.py").touch()
    monkeypatch.setattr(compiled, "ROOT", tmp_path)
    return folder


def compile_at(source: Path, seconds: float) -> None:
    twin = source.with_suffix(compiled.EXTENSION_SUFFIXES[0])
    twin.touch()
    modified = source.stat().st_mtime + seconds
    os.utime(twin, (modified, modified))


def test_sources_without_twins_are_not_stale(checkout):
    assert not compiled.is_stale()


def test_one_edited_source_makes_all_twins_stale(checkout):
    compile_at(checkout / "a.py", 1)
    compile_at(checkout / "b.py", 1)
    assert not compiled.is_stale()
    compile_at(checkout / "b.py", -1)
    assert compiled.is_stale()


def test_installed_files_are_taken_as_they_are(checkout):
    compile_at(checkout / "a.py", -1)
    (checkout.parent / "setup.py").unlink()
    assert not compiled.is_stale()


def test_sources_run_when_asked_for(tmp_path):
    code = """if True:
        from kvpilot.engine import compiled
        from kvpilot.engine.kv import pool
        print(pool.__file__, compiled.is_in_use())"""
    environment = {**os.environ, "KVPILOT_COMPILED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    file, in_use = done.stdout.split()
    assert file.endswith("pool.py")
    assert in_use == "False"
