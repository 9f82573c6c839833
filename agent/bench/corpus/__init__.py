"""Texts that the quality benchmark scores; README.md says where they come from and under which licence."""

from importlib import resources

PROSE = ("emma", "mansfield_park", "northanger_abbey", "persuasion")
CODE = ("cpython_fractions", "cpython_heapq", "cpython_statistics", "cpython_textwrap")


def read_texts() -> dict[str, str]:
    """Name -> text, prose and code in turn, so that the first few are a fair sample of both."""
    names = [name for pair in zip(PROSE, CODE, strict=True) for name in pair]
    folder = resources.files(__name__) / "texts"
    return {name: (folder / f"{name}.txt").read_text("utf-8") for name in names}
