"""Builds the CPU kernels, once per instruction set; without a compiler kvpilot runs on torch operations."""

import platform

from setuptools import Extension, setup

FLAGS = ["-std=c++17", "-O3", "-ffast-math", "-fno-finite-math-only", "-fopenmp"]
TARGETS = {"v4": ["-march=x86-64-v4"], "v3": ["-march=x86-64-v3"]} if platform.machine() == "x86_64" else {"any": []}

setup(
    ext_modules=[
        Extension(
            f"kvpilot.engine.kernels._cpu_{name}",
            sources=["engine/kernels/cpu.cpp"],
            define_macros=[("KVPILOT_MODULE", f"_cpu_{name}")],
            extra_compile_args=[*FLAGS, *target],
            extra_link_args=["-fopenmp"],
            optional=True,
        )
        for name, target in TARGETS.items()
    ]
)
