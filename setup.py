"""Builds what is optional: CPU kernels (once per instruction set), and our bookkeeping compiled from its own sources.

Without a C++ compiler kvpilot runs on torch operations; without mypyc, or where it fails, on the sources as they are.
"""

import os
import platform
import sys
import tempfile
from contextlib import chdir
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
FLAGS = [
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-Wno-psabi",
    "-Wno-ignored-attributes",
    "-Wno-maybe-uninitialized",  # in the compiler's own headers
]
TARGETS = (
    {"v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"], "v3": ["-march=x86-64-v3"]}
    if platform.machine() == "x86_64"
    else {"any": []}
)
HEADERS = ("simd", "formats", "elementwise", "attention", "convert", "prefill")

# What runs per page, per step or per request, and calls each other. Keep engine/compiled.py: FOLDERS in step.
COMPILED = {
    "engine": ("core", "request", "scheduler", "stats", "step_features"),
    "engine/kv": (
        *("cache", "eviction", "formats", "hashing", "idle", "idle_queue", "page"),
        *("pool", "slots", "storage"),
    ),
    "env/simulator": ("clock", "core", "step_cost"),
}
GROUP = "kvpilot.engine._compiled"  # all of them are one library, GROUP__mypyc, and a shim for each module
MYPY_OPTIONS = [
    "--config-file=",
    "--no-site-packages",  # what others' modules look like does not matter
    "--ignore-missing-imports",
    "--follow-imports=silent",
    "--namespace-packages",
    "--explicit-package-bases",
]


def kernels() -> list[Extension]:
    return [
        Extension(
            f"kvpilot.engine.kernels._cpu_{name}",
            sources=["engine/kernels/cpu.cpp"],
            depends=[f"engine/kernels/{name}.h" for name in HEADERS],
            define_macros=[("KVPILOT_MODULE", f"_cpu_{name}")],
            extra_compile_args=[*FLAGS, *target],
            extra_link_args=["-fopenmp"],
            optional=True,
        )
        for name, target in TARGETS.items()
    ]


def compiled_modules(build_folder: Path) -> list[Extension]:
    """The sources of COMPILED in C; none if there is no mypyc, or if it does not accept them (it says why)."""
    try:
        from mypyc.build import mypycify
    except ImportError:
        print("mypyc is not installed: the bookkeeping stays interpreted", file=sys.stderr)
        return []
    names = [f"kvpilot/{folder}/{name}.py" for folder, names in COMPILED.items() for name in names]
    with tempfile.TemporaryDirectory() as base, chdir(base):  # the checkout seen as the package `kvpilot`
        os.symlink(ROOT, "kvpilot")
        try:
            modules = mypycify(
                [*MYPY_OPTIONS, *names], debug_level="0", group_name=GROUP, target_dir=str(build_folder)
            )
        except SystemExit as error:
            print(f"mypyc failed, the bookkeeping stays interpreted: {error}", file=sys.stderr)
            return []
    for module in modules:
        module.optional = True
    return modules  # pyright: ignore[reportReturnType]  distutils' class, of which ours is one


class BuildExtensions(build_ext):
    """Translates only when something is built, not when setuptools merely asks for metadata."""

    def finalize_options(self) -> None:
        if self.distribution.ext_modules == KERNELS:
            build_folder = ROOT / "build" / "mypyc"
            self.distribution.ext_modules = KERNELS + compiled_modules(build_folder)
        super().finalize_options()

    def build_extensions(self) -> None:
        if self.inplace or self.editable_mode:
            for folder in COMPILED:  # of an earlier build, with another list
                for source in (ROOT / folder).glob("*.py"):
                    source.with_suffix(EXTENSION_SUFFIXES[0]).unlink(missing_ok=True)
        super().build_extensions()
        compiled = [ext for ext in self.extensions if ext not in KERNELS]
        if compiled and not all(Path(self.get_ext_fullpath(ext.name)).exists() for ext in compiled):
            print("mypyc's output was not built: the bookkeeping stays interpreted", file=sys.stderr)
            for ext in compiled:  # a module without its library could not be imported
                Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)


KERNELS = kernels()
setup(ext_modules=KERNELS, cmdclass={"build_ext": BuildExtensions})
