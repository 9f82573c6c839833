"""Draws architecture.svg from the imports of the code: `python docs/draw_layers.py` writes it beside this file.

A box is a top-level folder, in the row of its layer; a chip in it is a subfolder, with the chips of the same folder
that it imports. An arrow says that some module of one folder imports some module of another. Standard library only.
"""

import ast
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "architecture.svg"
HERE = "(files here)"  # the chip of what lies in a top-level folder itself

Place = tuple[str, str]  # top-level folder, chip


class Box(NamedTuple):
    """Where a top-level folder is drawn, in pixels."""

    x: int
    y: int
    width: int
    height: int
    columns: int  # of chips


HEAD, CHIP_STEP, CHIP_HEIGHT, MARGIN, GAP = 30, 44, 38, 10, 40
WIDTH = 1000
LAYERS = (  # from above: folder -> x, width, columns; arrows pass between the boxes of a layer
    {"agent": (0, 1000, 3)},
    {"k8s": (0, 170, 1), "env": (220, 530, 3), "dashboards": (800, 200, 1)},
    {"exporter": (480, 490, 2)},
    {"engine": (0, 1000, 3)},
)
FOLDERS = [top for layer in LAYERS for top in layer]


def chip_of(module: Path) -> str:
    """Of a module's path from its top-level folder on."""
    return module.parts[0] if len(module.parts) > 1 else HERE


def imports() -> set[tuple[Place, Place]]:
    """Which chip imports which, wherever in a module the import stands."""
    found: set[tuple[Place, Place]] = set()
    for top in FOLDERS:
        for source in sorted((ROOT / top).rglob("*.py")):
            chip = chip_of(source.relative_to(ROOT / top))
            for name in _imported(ast.parse(source.read_text(encoding="utf-8"))):
                found.add(((top, chip), _place(name)))
    return found


def _imported(tree: ast.AST) -> Iterable[str]:
    """Dotted names below `kvpilot`; of `from kvpilot.a import b` both readings end in the same place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.removeprefix("kvpilot.") for name in names if name.startswith("kvpilot."))


def _place(name: str) -> Place:
    top, _, rest = name.partition(".")
    first = rest.partition(".")[0]
    return (top, first if first and (ROOT / top / first).is_dir() else HERE)


def chips(top: str) -> list[str]:
    """Those with code in them, the folder's own files first."""
    found = {chip_of(source.relative_to(ROOT / top)) for source in (ROOT / top).rglob("*.py")}
    return sorted(found, key=lambda chip: (chip != HERE, chip))


def title(top: str) -> str:
    """The first line of the folder's README, without marks."""
    return (
        (ROOT / top / "README.md")
        .read_text(encoding="utf-8")
        .splitlines()[0]
        .removeprefix("# ")
        .replace("`", "")
    )


def boxes() -> dict[str, Box]:
    """As high as the chips need, layer below layer."""
    found, y = {}, 0
    for layer in LAYERS:
        for top, (x, width, columns) in layer.items():
            height = HEAD + -(-len(chips(top)) // columns) * CHIP_STEP + MARGIN // 2
            found[top] = Box(x, y, width, height, columns)
        y = max(found[top].y + found[top].height for top in layer) + GAP
    return found


def free_spans(upper: Box, lower: Box, others: Iterable[Box]) -> list[tuple[int, int]]:
    """Where a straight arrow from one box down to another meets no third one."""
    spans = [(max(upper.x, lower.x), min(upper.x + upper.width, lower.x + lower.width))]
    for box in others:
        if upper.y < box.y < lower.y:
            left = [(start, min(end, box.x)) for start, end in spans]
            right = [(max(start, box.x + box.width), end) for start, end in spans]
            spans = [span for span in left + right if span[0] < span[1]]
    return spans


def draw() -> str:
    edges, placed = imports(), boxes()
    height = max(box.y + box.height for box in placed.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 -8 {WIDTH + 16} {height + 16}" '
        'font-family="sans-serif" font-size="13">',
        '<rect x="-8" y="-8" width="100%" height="100%" fill="white"/>',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto"><path d="M0 0L8 4L0 8z" fill="#444"/></marker></defs>',
    ]
    for top, box in placed.items():
        parts += _box(top, box, edges)
    for upper, lower in sorted({(start[0], end[0]) for start, end in edges if start[0] != end[0]}):
        parts.append(_arrow(placed[upper], placed[lower], placed.values()))
    return "\n".join([*parts, "</svg>", ""])


def _box(top: str, box: Box, edges: set[tuple[Place, Place]]) -> list[str]:
    parts = [
        f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="6" fill="#f2f5fa" '
        'stroke="#5b7db1"/>',
        f'<text x="{box.x + MARGIN}" y="{box.y + 20}">{_bold_name(title(top), box.width)}</text>',
    ]
    step = (box.width - MARGIN) / box.columns
    for number, name in enumerate(chips(top)):
        row, column = divmod(number, box.columns)
        x, y = box.x + MARGIN + column * step, box.y + HEAD + row * CHIP_STEP
        used = sorted(
            {end[1] for start, end in edges if start == (top, name) and end[0] == top} - {name, HERE}
        )
        parts += _chip(x, y, step - MARGIN, name if name == HERE else f"{name}/", used)
    return parts


def _bold_name(text: str, width: int) -> str:
    """What follows the name is left out where the box is narrow."""
    name, colon, what = text.partition(": ")
    rest = f"{colon}{escape(what)}" if colon and len(text) * 7 < width else ""
    return f'<tspan font-weight="bold">{escape(name)}</tspan>{rest}'


def _chip(x: float, y: float, width: float, name: str, used: list[str]) -> list[str]:
    uses = f"uses {', '.join(used)}" if used else ""
    return [
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{CHIP_HEIGHT}" rx="4" fill="white" '
        'stroke="#b7c6dd"/>',
        f'<text x="{x + 8:.0f}" y="{y + 16:.0f}">{escape(name)}</text>',
        f'<text x="{x + 8:.0f}" y="{y + 31:.0f}" font-size="10" fill="#555">{escape(uses)}</text>',
    ]


def _arrow(upper: Box, lower: Box, others: Iterable[Box]) -> str:
    assert upper.y < lower.y, "an import upwards: `make layers` says where"
    spans = free_spans(upper, lower, others)
    assert spans, "no straight way for an arrow: move the boxes of LAYERS"
    start, end = max(spans, key=lambda span: span[1] - span[0])
    x, top = (start + end) / 2, upper.y + upper.height
    return f'<path d="M{x:g} {top}V{lower.y}" stroke="#444" stroke-width="1.5" marker-end="url(#tip)"/>'


if __name__ == "__main__":
    TARGET.write_text(draw(), encoding="utf-8")
    print(TARGET)
