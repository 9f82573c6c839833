"""The images cannot be built here: what their files name must exist, and what they install must install."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "k8s" / "docker"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
IMAGES = ("engine", "sidecar")


def instructions(image: str) -> list[tuple[str, str]]:
    """Instruction and rest of each line of a Dockerfile, continued lines joined."""
    text = (DOCKER / f"Dockerfile.{image}").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


def pinned() -> dict[str, str]:
    lines = (DOCKER / "sidecar-requirements.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pins}


@pytest.mark.parametrize("image", IMAGES)
def test_everything_that_is_copied_exists(image):
    copied = [rest.split() for name, rest in instructions(image) if name == "COPY"]
    sources = [source for words in copied if not words[0].startswith("--") for source in words[:-1]]
    assert len(sources) >= 9
    for source in sources:
        assert (ROOT / source).exists(), source


@pytest.mark.parametrize("image", IMAGES)
def test_all_packages_are_copied(image):
    copied = " ".join(rest for name, rest in instructions(image) if name == "COPY").split()
    top_folders = {package.split(".")[1] for package in PROJECT["tool"]["setuptools"]["packages"]}
    assert top_folders <= set(copied)


@pytest.mark.parametrize("image", IMAGES)
def test_modules_and_commands_that_are_named_exist(image):
    text = (DOCKER / f"Dockerfile.{image}").read_text()
    for module in re.findall(r"from (kvpilot[\w.]*) import|-m (kvpilot[\w.]*)", text):
        assert importlib.util.find_spec("".join(module)) is not None, module
    (entry,) = [rest for name, rest in instructions(image) if name == "ENTRYPOINT"]
    assert entry == '["autotune"]'
    assert "autotune" in PROJECT["project"]["scripts"]
    extras = re.findall(r'"\.\[([\w,]+)\]"', text)
    for extra in ",".join(extras).split(",") if extras else ():
        assert extra in PROJECT["project"]["optional-dependencies"]


@pytest.mark.parametrize("image", IMAGES)
def test_images_are_staged_pinned_and_not_root(image):
    found = instructions(image)
    assert [rest for name, rest in found if name == "FROM"] == ["${PYTHON} AS build", "${PYTHON}"]
    (base,) = [rest for name, rest in found if name == "ARG" and rest.startswith("PYTHON=")]
    assert re.fullmatch(r"PYTHON=python:3\.\d+\.\d+-slim-\w+", base)
    users = [rest for name, rest in found if name == "USER"]
    assert users == ["10001:10001"]
    last_run = max(position for position, (name, _) in enumerate(found) if name in ("RUN", "COPY"))
    assert found.index(("USER", users[0])) > last_run


def test_the_lock_file_holds_what_the_sidecar_needs_and_not_torch():
    pins, extras = pinned(), PROJECT["project"]["optional-dependencies"]
    wanted = (*PROJECT["project"]["dependencies"], *extras["control"], *extras["k8s"])
    for requirement in (Requirement(text) for text in wanted if text != "kvpilot[control]"):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), str(requirement)
    assert not {"torch", "triton", "transformers", "tokenizers", "gguf"} & set(pins)


def test_the_engine_takes_a_torch_that_the_project_allows():
    (torch,) = [rest for name, rest in instructions("engine") if name == "ARG" and rest.startswith("TORCH=")]
    extras = PROJECT["project"]["optional-dependencies"]
    (allowed,) = [each for each in extras["engine"] if each.startswith("torch")]
    (version,) = re.findall(r"==([\d.]+)$", torch)
    assert Requirement(allowed).specifier.contains(version)


@pytest.fixture
def build(tmp_path):
    """Runs an image's own RUN lines on copies of what it copies, `/opt/kvpilot` and `/src` under a folder."""

    def run(image: str, *, only: str) -> Path:
        source = tmp_path / "src"
        source.mkdir()
        for name, rest in instructions(image):
            if name != "COPY" or rest.startswith("--"):
                continue
            *paths, _ = rest.split()
            for path in paths:
                target = source / path
                target.parent.mkdir(parents=True, exist_ok=True)
                if (ROOT / path).is_dir():
                    ignore = shutil.ignore_patterns("__pycache__", "*.so")
                    shutil.copytree(ROOT / path, target, ignore=ignore, dirs_exist_ok=True)
                else:
                    shutil.copy(ROOT / path, target)
        commands = [rest for name, rest in instructions(image) if name == "RUN" and re.search(only, rest)]
        assert commands
        for command in commands:
            here = command.replace("/opt/kvpilot", str(tmp_path / "opt")).replace(
                "python -m venv", "$PYTHON -m venv"
            )
            no_compiler = {
                "CC": "/bin/false",
                "CXX": "/bin/false",
            }  # the kernels are optional, `make` builds them
            environment = {**os.environ, **no_compiler, "PYTHON": sys.executable, "PYTHONPATH": ""}
            result = subprocess.run(
                here, shell=True, cwd=source, env=environment, capture_output=True, text=True, check=False
            )
            assert result.returncode == 0, f"{here}\n{result.stdout[-2000:]}{result.stderr[-2000:]}"
        return tmp_path / "opt" / "venv" / "bin"

    return run


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_the_sidecars_environment_installs_and_runs_without_torch(build, tmp_path):
    programs = build("sidecar", only="venv")

    def run(*command: str) -> str:
        environment = {**os.environ, "PYTHONPATH": "", "HOME": str(tmp_path)}
        result = subprocess.run(
            [str(programs / command[0]), *command[1:]],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
        return result.stdout

    assert "torch" not in run("pip", "list")
    run("python", "-m", "kvpilot.k8s.make_token", str(tmp_path / "run" / "admin.token"))
    assert (tmp_path / "run" / "admin.token").stat().st_mode & 0o777 == 0o600
    assert "kubernetes" in run("autotune", "operator", "--help").lower()
    assert "--listen" in run("autotune", "run", "--help")
    run(
        "python",
        "-c",
        "import kvpilot.agent.control.run, kvpilot.agent.operator_run, kvpilot.k8s.control_source",
    )
    names = run(
        "python",
        "-c",
        "from kvpilot.agent.policies import NAMED, load_policy; print(*map(load_policy, NAMED))",
    )
    assert "ThresholdPolicy" in names


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_the_engines_install_command_works_where_torch_is(build, tmp_path):
    """Torch comes from this environment: its own line would fetch gigabytes."""
    build("engine", only=r"python -m venv")
    (packages,) = (tmp_path / "opt" / "venv").glob("lib/python*/site-packages")
    import torch

    (packages / "borrowed.pth").write_text(str(Path(torch.__file__).parents[1]) + "\n")
    shutil.rmtree(tmp_path / "src")
    programs = build("engine", only=r"pip install .*\.\[")
    result = subprocess.run(
        [str(programs / "autotune"), "serve", "--help"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "--admin-token-file" in result.stdout
    assert (packages / "kvpilot").is_dir()
