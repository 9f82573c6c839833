"""The corpus is fixed: results are comparable only on the same bytes."""

import hashlib
from importlib import resources

from kvpilot.agent.bench import corpus

SHA256 = "b58a621b23718221a48d16844b338277ab722898943dde09a80af79e83ab002c"


def test_the_texts_are_those_of_the_published_results():
    digest = hashlib.sha256("".join(corpus.read_texts().values()).encode()).hexdigest()
    assert digest == SHA256, (
        "a change makes docs/benchmarks.md and engine/kv/quality.json wrong: measure again"
    )


def test_prose_and_code_take_turns():
    names = list(corpus.read_texts())
    assert names[::2] == list(corpus.PROSE)
    assert names[1::2] == list(corpus.CODE)


def test_every_text_has_its_licence_stated():
    folder = resources.files(corpus)
    readme = (folder / "README.md").read_text()
    shipped = {path.name for path in (folder / "texts").iterdir()}
    assert shipped == {f"{name}.txt" for name in corpus.read_texts()}
    assert all(f"texts/{name}" in readme for name in shipped)
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in (folder / "LICENSE-PSF.txt").read_text()
