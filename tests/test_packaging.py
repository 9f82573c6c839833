"""The package list is kept by hand: in editable mode a missing entry works, in the wheel it does not."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import typer
from packaging.requirements import Requirement

from kvpilot.agent.cli import app
from kvpilot.agent.extras import NEEDED

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
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Built from the sdist of a copy, without isolation, and without what is compiled, which is optional."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for top in TOP:
        shutil.copytree(ROOT / top, source / top, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (source / "tests").mkdir()
    shutil.copy(__file__, source / "tests")
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(target)!r})"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", build],
        cwd=source,
        check=True,
        timeout=120,
        capture_output=True,
    )
    (sdist,) = target.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert not [name for name in archive.getnames() if "/tests/" in name]
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-q"]
    subprocess.run([*command, "-w", str(target), str(sdist)], check=True, timeout=120)
    (found,) = target.glob("*.whl")
    return zipfile.ZipFile(found)


@pytest.fixture(scope="module")
def wheel_names(wheel) -> set[str]:
    return set(wheel.namelist())


@pytest.fixture(scope="module")
def requirements(wheel) -> dict[str, set[str]]:
    """Names of packages by extra, as the wheel states them; "" for what every installation gets."""
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    found: dict[str, set[str]] = {}
    for text in Parser().parsestr(wheel.read(name).decode()).get_all("Requires-Dist", []):
        requirement = Requirement(text)
        extra = re.findall(r'extra == "(\w+)"', str(requirement.marker))
        names = {f"kvpilot[{each}]" for each in requirement.extras} or {requirement.name}
        found.setdefault("".join(extra), set()).update(names)
    return found


def reached(requirements: dict[str, set[str]], extra: str) -> set[str]:
    """What an extra brings, with the core and the extras that it names."""
    names = requirements[""] | requirements[extra]
    for name in requirements[extra]:
        if name.startswith("kvpilot["):
            names |= reached(requirements, name[len("kvpilot[") : -1])
    return names


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


def test_type_checkers_are_told_that_each_part_is_typed(wheel_names):
    assert {f"kvpilot/{top}/py.typed" for top in TOP} <= wheel_names


def test_the_sidecar_and_the_traces_install_without_torch(requirements):
    heavy = {"torch", "stable-baselines3", "triton"}
    for extra in ("control", "k8s", "env", "otel", "dashboards"):
        assert not heavy & reached(requirements, extra), extra
    for extra in ("engine", "serve", "train", "cuda"):
        assert "torch" in reached(requirements, extra), extra


def test_the_engine_installs_without_a_server(requirements):
    assert not {"fastapi", "uvicorn", "pydantic"} & reached(requirements, "engine")


def test_every_command_names_extras_that_exist(requirements):
    commands = set(typer.main.get_command(app).commands)  # pyright: ignore[reportAttributeAccessIssue]  a group
    assert set(NEEDED) == commands
    assert {extra for needed in NEEDED.values() for extra in needed.split(",")} <= set(requirements)


def test_a_missing_package_is_said_by_its_extra(tmp_path):
    program = "import sys; sys.modules['httpx'] = None; from kvpilot.agent.cli import main; main()"
    command = [sys.executable, "-c", program, "knobs", "get"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert told.returncode == 1
    assert "`autotune knobs` needs httpx" in told.stderr
    assert "pip install 'kvpilot[control]'" in told.stderr
