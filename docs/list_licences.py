"""Lists what kvpilot needs at run time, and under which licences: `python docs/list_licences.py` prints the table of
licences.md. What is read is the metadata of what is installed beside it, so install all runtime extras first."""

import re
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NOT_AT_RUN_TIME = ("dev", "bench")
MAX_CHARS = 120  # some put the whole text where a name belongs


def groups() -> dict[str, list[str]]:
    """Requirements as pyproject.toml has them, by extra; "core" for those of all."""
    extras = PROJECT["optional-dependencies"]
    return {"core": PROJECT["dependencies"]} | {
        name: [text for text in needed if Requirement(text).name != PROJECT["name"]]  # extras of our own
        for name, needed in extras.items()
        if name not in NOT_AT_RUN_TIME
    }


def reached(needed: Iterable[str]) -> dict[str, Distribution | None]:
    """By name what these requirements bring, directly or not; None where it is not installed."""
    found: dict[str, Distribution | None] = {}
    todo, seen = [Requirement(text) for text in needed], set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if (name, *sorted(requirement.extras)) in seen:
            continue
        seen.add((name, *sorted(requirement.extras)))
        try:
            found[name] = installed = distribution(name)
        except PackageNotFoundError:
            found[name] = None
            continue
        todo += _of(installed, requirement.extras)
    return found


def _of(installed: Distribution, extras: set[str]) -> Iterator[Requirement]:
    for text in installed.requires or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def licence(installed: Distribution) -> str:
    """The SPDX expression; where there is none, the field's first line, else the classifiers."""
    about = installed.metadata
    fields = [about[name] for name in ("License-Expression", "License") if name in about]
    stated = (fields[0] if fields else "").strip().partition("\n")[0]
    classified = [
        re.sub(r" \(.*\)$", "", entry.rpartition(" :: ")[2])
        for entry in about.get_all("Classifier") or []
        if entry.startswith("License :: ")
    ]
    unusable = not stated or stated.startswith("Copyright") or stated in ("UNKNOWN", "Dual License")
    chosen = ", ".join(classified) if unusable else stated
    return chosen if len(chosen) <= MAX_CHARS else f"{chosen[:MAX_CHARS]}..."


def main() -> None:
    extras: dict[str, list[str]] = {}
    packages: dict[str, Distribution | None] = {}
    for extra, needed in groups().items():
        for name, installed in reached(needed).items():
            extras.setdefault(name, []).append(extra)
            packages[name] = installed
    print("| package | version | licence | by |\n|---|---|---|---|")
    for name, installed in sorted(packages.items()):
        about = (
            (installed.version, licence(installed) or "not stated")
            if installed
            else ("-", "not installed here")
        )
        print(f"| {name} | {' | '.join(about)} | {', '.join(extras[name])} |")


if __name__ == "__main__":
    main()
