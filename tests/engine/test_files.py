"""A file is written whole or not at all."""

import pytest

from kvpilot.engine.errors import KVPilotError
from kvpilot.engine.files import save, whole_file, write_whole


@pytest.mark.parametrize(
    ("content", "held"), [("text \u00e9\n", b"text \xc3\xa9\n"), (b"\x00\xff", b"\x00\xff")]
)
def test_new_content_takes_the_place_of_the_old(tmp_path, content, held):
    path = tmp_path / "a.json"
    for _ in range(2):
        write_whole(path, content)
        assert path.read_bytes() == held
    assert list(tmp_path.iterdir()) == [path]


def test_after_an_error_the_old_content_is_there_and_nothing_else(tmp_path):
    path = tmp_path / "a.json"
    write_whole(path, "old")

    def write_half() -> None:
        with whole_file(path) as temporary:
            temporary.write_text("ne")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_may_write_the_same_file_at_once(tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    with whole_file(path) as first:
        first.write_text("first")
        with whole_file(path) as second:
            assert second != first
            assert second.name.endswith(".jsonl.gz")
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"


def test_a_folder_that_is_not_there_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "none" / "a.json", "x")


def test_what_is_saved_gets_a_folder_and_what_cannot_be_is_named(tmp_path):
    save(tmp_path / "new" / "a.json", "x")
    assert (tmp_path / "new" / "a.json").read_text() == "x"
    with pytest.raises(KVPilotError, match=r"a\.json/b\.json cannot be written"):
        save(tmp_path / "new" / "a.json" / "b.json", "x")
