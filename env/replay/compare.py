"""What several replays need beyond one: names, what each was, and whether they may be compared at all."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpilot.engine.errors import ConfigError
from kvpilot.env.replay.result import ReplayResult

GIB = 2.0**30
REBLOCKED = "with_block_size"  # the page size of a replay, not its traffic


def page_of(out: Path, inputs: Sequence[Path]) -> Path:
    """`out`. Raises ConfigError if it is no page, has no folder, or is an input or an input's page."""
    check_out(out, ".html")
    for source in inputs:
        if out.resolve() in (source.resolve(), source.with_suffix(".html").resolve()):
            raise ConfigError(
                f"out={str(out)!r} is invalid: expected another name, it would overwrite the page of {source}"
            )
    return out


def check_out(out: Path, suffix: str) -> None:
    """Before long work. Raises ConfigError."""
    if out.suffix != suffix:
        raise ConfigError(f"out={str(out)!r} is invalid: expected a name that ends in {suffix}")
    if not out.parent.is_dir():
        raise ConfigError(f"out={str(out)!r} is invalid: there is no folder {out.parent}")
    for path in (out, out.with_suffix(".html")):
        if path.is_dir():
            raise ConfigError(f"out={str(out)!r} is invalid: {path} is a folder")
    if not os.access(out.parent, os.W_OK):
        raise ConfigError(f"out={str(out)!r} is invalid: the folder {out.parent} cannot be written to")


def names_of(files: Sequence[Path]) -> list[str]:
    """Stems; equal ones with as many folders before them as tell them apart, the same file again with a number."""
    paths = [file.resolve() for file in files]
    names = {path: path.stem for path in paths}
    for depth in range(2, max(len(path.parts) for path in paths)):
        seen = Counter(names.values())
        if len(seen) == len(names):
            break
        names = {
            path: name if seen[name] == 1 else "/".join(path.with_suffix("").parts[1:][-depth:])
            for path, name in names.items()
        }
    times = [paths[: k + 1].count(path) for k, path in enumerate(paths)]
    return [
        names[path] if time == 1 else f"{names[path]} ({time})"
        for path, time in zip(paths, times, strict=True)
    ]


def describe(result: ReplayResult) -> str:
    """Trace, pool, knobs and eviction in words; of a replay against a server what is known."""
    config, trace = result.config, result.trace
    parts = [f"trace {trace.get('name', 'unnamed')} of {trace.get('num_requests', 0):,} requests"]
    if config.get("users") is not None:
        parts.append(f"{config['users']} users in closed loop")
    if engine := config.get("engine"):
        knobs = ", ".join(f"{name}={value:g}" for name, value in engine["knobs"].items())
        parts += [
            f"pool of {engine['pool_bytes'] / GIB:.4g} GiB in pages of {engine['page_size']} tokens",
            f"eviction {engine['eviction']}",
            f"knobs at start {knobs}",
        ]
    return "; ".join(parts)


def warnings_of(results: Sequence[tuple[str, ReplayResult]]) -> list[str]:
    """Why the figures do not measure the same: other traffic than the first replay's, or another SLO."""
    (first_name, first), *others = results
    lines = []
    for name, result in others:
        if _traffic(result) != _traffic(first):
            lines.append(
                f"{name} replays other traffic than {first_name} ({_short(result)}; {_short(first)}): "
                "differences may be the traffic's"
            )
        if result.slo != first.slo:
            lines.append(f"{name} has another SLO than {first_name}: good requests are not counted alike")
    return lines


def _traffic(result: ReplayResult) -> tuple[Any, ...]:
    trace = result.trace
    steps = [step for step in trace.get("provenance", []) if step.get("step") != REBLOCKED]
    return trace.get("name"), trace.get("num_requests"), steps, result.config.get("users")


def _short(result: ReplayResult) -> str:
    users = result.config.get("users")
    loop = "" if users is None else f", {users} users"
    return f"{result.trace.get('name', 'unnamed')}, {result.trace.get('num_requests', 0):,} requests{loop}"
