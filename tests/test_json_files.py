"""A file is whole or not there: the old content, or the new, and nothing beside it."""

import os
from pathlib import Path

import pytest

from npbml.errors import RunError
from npbml.json_files import read_json, write_json, write_whole


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_and_nothing_stays_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file"
    for content in (b"first", b"second, longer", b""):
        write_whole(path, content)
        assert path.read_bytes() == content and names(path.parent) == ["file"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(RunError, match=r"file could not be saved: No space left on device.*the same command"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old" and names(tmp_path) == ["file"]


def test_the_old_file_is_there_until_the_new_one_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a crash at the moment of the rename would leave behind: the old file, and all of the new one aside."""
    path, seen = tmp_path / "file", []
    write_whole(path, b"old")
    replace = os.replace

    def watched(aside: Path, target: Path) -> None:
        seen.append((Path(aside).read_bytes(), Path(target).read_bytes()))
        replace(aside, target)

    monkeypatch.setattr(os, "replace", watched)
    write_whole(path, b"new")
    assert seen == [(b"new", b"old")] and path.read_bytes() == b"new"


def test_a_place_where_no_file_can_be_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for path in (tmp_path / "file" / "below", tmp_path / "file" / "far" / "below"):
        with pytest.raises(RunError, match="below could not be saved"):
            write_whole(path, b"new")
    assert (tmp_path / "file").read_text() == "not a folder" and names(tmp_path) == ["file"]


@pytest.mark.parametrize(
    "data", [{"a": [1, 2.5, None, True], "b": {"c": "ä"}}, [], 3, "text", {"tiny": 5e-324, "third": 1 / 3}]
)
def test_json_is_read_as_it_was_written(tmp_path: Path, data: object) -> None:
    write_json(tmp_path / "data.json", data)
    assert read_json(tmp_path / "data.json") == data


@pytest.mark.parametrize("content", [b"", b'{"a": ', b"\xff\xfe\x00", b"{'a': 1}"])
def test_damaged_json_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "data.json").write_bytes(content)
    with pytest.raises(RunError, match=r"data\.json cannot be read"):
        read_json(tmp_path / "data.json")


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"gone\.json is not there"):
        read_json(tmp_path / "gone.json")
