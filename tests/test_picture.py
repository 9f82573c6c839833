"""docs/architecture.svg is what docs/draw_layers.py draws from the imports: run it to draw it anew."""

import importlib.util
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def draw_layers():
    spec = importlib.util.spec_from_file_location("draw_layers", ROOT / "docs" / "draw_layers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_shows_the_imports_there_are(draw_layers):
    drawn = (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")
    assert drawn == draw_layers.draw(), "run python docs/draw_layers.py"


def test_the_picture_is_svg_with_a_chip_for_every_folder(draw_layers):
    texts = ElementTree.fromstring(draw_layers.draw()).iter("{http://www.w3.org/2000/svg}text")
    shown = {"".join(text.itertext()) for text in texts}
    packages = {path.parent for top in draw_layers.FOLDERS for path in (ROOT / top).glob("*/__init__.py")}
    assert packages
    assert {f"{folder.name}/" for folder in packages} <= shown


def test_an_import_is_found_wherever_it_stands(draw_layers):
    found = draw_layers.imports()
    assert (("agent", "policies"), ("agent", "tune")) in found  # within a function
    assert (("exporter", "(files here)"), ("engine", "(files here)")) in found
    assert not [edge for edge in found if edge[0][0] == "engine" and edge[1][0] != "engine"]
