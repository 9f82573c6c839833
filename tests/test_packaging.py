"""The package list is kept by hand: in editable mode a missing entry works, in the wheel it does not."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOP = ("agent", "dashboards", "engine", "env", "exporter", "k8s")
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def package_folders() -> dict[str, Path]:
    found = [init.parent for top in TOP for init in (ROOT / top).rglob("__init__.py")]
    return {".".join(("kvpilot", *folder.relative_to(ROOT).parts)): folder for folder in found}


def data_files() -> set[Path]:
    """What is neither Python nor built: it must be declared as package data."""
    files = [path for top in TOP for path in (ROOT / top).rglob("*") if path.is_file()]
    return {path.relative_to(ROOT) for path in files if path.suffix not in (".py", ".pyc", ".so")}


def test_every_folder_with_code_is_a_package_and_listed():
    with_code = {source.parent for top in TOP for source in (ROOT / top).rglob("*.py")}
    assert with_code == set(package_folders().values())
    assert sorted(SETUP["packages"]) == sorted(package_folders())


def test_all_data_files_are_declared():
    declared = set()
    for package, patterns in SETUP["package-data"].items():
        for pattern in patterns:
            declared |= {path.relative_to(ROOT) for path in package_folders()[package].glob(pattern)}
    assert data_files() <= declared


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory) -> set[str]:
    """Built from a copy, without isolation, and without the compiled kernels, which are optional."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for top in TOP:
        if (ROOT / top).is_dir():
            shutil.copytree(ROOT / top, source / top, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-q"]
    subprocess.run([*command, "-w", str(target), str(source)], check=True, timeout=120)
    (wheel,) = target.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_holds_all_code_and_data_under_one_name(wheel_names):
    sources = {
        path.relative_to(ROOT) for folder in package_folders().values() for path in folder.glob("*.py")
    }
    expected = {f"kvpilot/{path.as_posix()}" for path in sources | data_files()}
    packaged = {name for name in wheel_names if ".dist-info/" not in name}
    assert packaged == expected


def test_the_wheel_has_the_command(wheel_names):
    assert any(name.endswith(".dist-info/entry_points.txt") for name in wheel_names)


def test_the_wheel_has_the_licence(wheel_names):
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel_names)
