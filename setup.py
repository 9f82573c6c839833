"""Builds the CPU kernels, once per instruction set; without a compiler kvpilot runs on torch operations."""

import platform

from setuptools import Extension, setup

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

setup(
    ext_modules=[
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
)
