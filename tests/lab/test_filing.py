"""Pictures are moved or linked into class folders, and nothing is ever overwritten."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from npbml.errors import DataError
from npbml.lab.filing import How, file_pictures, plan_filing

HOW: list[How] = ["move", "link"]


def write(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


@pytest.mark.parametrize("how", HOW)
def test_every_picture_reaches_its_class_under_a_name_of_its_own(tmp_path: Path, how: How) -> None:
    files = [write(tmp_path / "many" / name / "a.jpg", name) for name in ("x", "y", "z")]
    before = write(tmp_path / "into" / "cat" / "a.jpg", "before")
    planned = plan_filing(dict.fromkeys(files, "cat"), tmp_path / "into")
    assert not (tmp_path / "into" / "cat" / "a-2.jpg").exists(), "a plan does nothing"
    filed = file_pictures(planned, how)
    assert filed.done == planned and not filed.failed and filed.copied == 0
    assert {path.name: path.read_text() for path in (tmp_path / "into" / "cat").iterdir()} == {
        "a.jpg": "before",
        "a-2.jpg": "x",
        "a-3.jpg": "y",
        "a-4.jpg": "z",
    }
    assert before.read_text() == "before"
    assert [file.exists() for file in files] == [how == "link"] * 3
    assert (tmp_path / "into" / "cat" / "a-2.jpg").is_symlink() is (how == "link")


@pytest.mark.parametrize("how", HOW)
def test_what_is_there_already_is_left_alone(tmp_path: Path, how: How) -> None:
    file = write(tmp_path / "many" / "a.jpg", "a")
    file_pictures(plan_filing({file: "cat"}, tmp_path / "into"), how)
    again = tmp_path / "into" / "cat" / "a.jpg" if how == "move" else file
    assert plan_filing({again: "cat"}, tmp_path / "into") == {}
    assert [path.name for path in (tmp_path / "into" / "cat").iterdir()] == ["a.jpg"]


def test_a_name_that_is_taken_after_the_plan_is_numbered_again(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jpg", "mine")
    planned = plan_filing({file: "cat"}, tmp_path / "into")
    write(tmp_path / "into" / "cat" / "a.jpg", "theirs")
    assert file_pictures(planned, "move").done == {file: tmp_path / "into" / "cat" / "a-2.jpg"}
    assert (tmp_path / "into" / "cat" / "a.jpg").read_text() == "theirs"


def test_a_broken_link_in_the_way_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "into" / "cat").mkdir(parents=True)
    (tmp_path / "into" / "cat" / "a.jpg").symlink_to("gone.jpg")
    planned = plan_filing({write(tmp_path / "a.jpg", "a"): "cat"}, tmp_path / "into")
    assert [target.name for target in planned.values()] == ["a-2.jpg"]


def test_a_relative_link_points_to_the_same_picture_after_it_is_moved(tmp_path: Path) -> None:
    write(tmp_path / "store" / "a.jpg", "a")
    (tmp_path / "many").mkdir()
    (tmp_path / "many" / "a.jpg").symlink_to(Path("../store/a.jpg"))
    file_pictures(plan_filing({tmp_path / "many" / "a.jpg": "cat"}, tmp_path / "into"), "move")
    assert (tmp_path / "into" / "cat" / "a.jpg").read_text() == "a"
    assert not os.path.lexists(tmp_path / "many" / "a.jpg") and (tmp_path / "store" / "a.jpg").exists()


def refuse(*_: Any, **__: Any) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("how", HOW)
def test_where_links_are_not_possible_files_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: How
) -> None:
    file, taken = write(tmp_path / "many" / "a.jpg", "a"), write(tmp_path / "into" / "cat" / "a.jpg", "taken")
    os.utime(file, ns=(1, 10**9))
    planned = plan_filing({file: "cat"}, tmp_path / "into")
    for name in ("link", "symlink"):
        monkeypatch.setattr(os, name, refuse)
    filed = file_pictures(planned, how)
    target = tmp_path / "into" / "cat" / "a-2.jpg"
    assert filed.done == {file: target} and filed.copied == (how == "link")
    assert target.read_text() == "a" and not target.is_symlink() and target.stat().st_mtime_ns == 10**9
    assert file.exists() is (how == "link") and taken.read_text() == "taken"


def test_a_failure_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    gone, there = tmp_path / "gone.jpg", write(tmp_path / "b.jpg", "b")
    planned = {gone: tmp_path / "into" / "cat" / "gone.jpg", there: tmp_path / "into" / "cat" / "b.jpg"}
    filed = file_pictures(planned, "move")
    assert filed.failed == {gone: "No such file or directory"} and list(filed.done) == [there]
    assert [path.name for path in (tmp_path / "into" / "cat").iterdir()] == ["b.jpg"]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../up"])
def test_a_class_that_cannot_be_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="cannot be the name of a folder"):
        plan_filing({write(tmp_path / "a.jpg", "a"): name}, tmp_path / "into")
