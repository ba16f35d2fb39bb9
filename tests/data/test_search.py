"""Which files below a folder are pictures."""

import os
from pathlib import Path

import pytest

from npbml.data.search import find_classes, find_pictures
from npbml.errors import DataError


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")


def names(root: Path, **how: object) -> list[str]:
    return [str(file.relative_to(root)) for file in find_pictures(root, **how).files]  # type: ignore[arg-type]


def test_pictures_are_found_at_any_depth_in_the_order_of_their_paths(tmp_path: Path) -> None:
    touch(tmp_path, "b.JPG", "a/z.png", "a/b/c/x.heic", "c.avif", "a.jfif")
    assert names(tmp_path) == ["a/b/c/x.heic", "a/z.png", "a.jfif", "b.JPG", "c.avif"]


def test_other_endings_are_counted_and_system_files_are_not(tmp_path: Path) -> None:
    touch(tmp_path, "a.jpg", "m.MP4", "b/n.mp4", "notes.txt", "README", "Thumbs.db", "desktop.ini")
    touch(tmp_path, ".DS_Store", "._a.jpg", ".git/x.jpg", "__MACOSX/y.jpg", "@eaDir/z.jpg")
    found = find_pictures(tmp_path)
    assert found.files == [tmp_path / "a.jpg"] and not found.unreadable
    assert found.ignored == {".mp4": 2, ".txt": 1, "": 1}


def test_links_are_followed_once_and_loops_end(tmp_path: Path) -> None:
    touch(tmp_path / "many", "real/deep/a.jpg")
    touch(tmp_path, "elsewhere/b.jpg")
    (tmp_path / "many" / "real" / "deep" / "up").symlink_to(tmp_path / "many")
    (tmp_path / "many" / "a link to real").symlink_to(tmp_path / "many" / "real")
    (tmp_path / "many" / "a link to deep").symlink_to(tmp_path / "many" / "real" / "deep")
    (tmp_path / "many" / "out").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "many" / "to nowhere").symlink_to(tmp_path / "nowhere")
    (tmp_path / "many" / "self").symlink_to("self")
    assert names(tmp_path / "many") == ["out/b.jpg", "real/deep/a.jpg"]


def test_a_picture_that_is_a_broken_link_is_told(tmp_path: Path) -> None:
    touch(tmp_path, "a.jpg")
    (tmp_path / "b.jpg").symlink_to("gone.jpg")
    found = find_pictures(tmp_path)
    assert found.files == [tmp_path / "a.jpg"]
    assert found.unreadable == {tmp_path / "b.jpg": "it is a link to a file that is not there"}


def test_a_pipe_is_no_picture(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jpg")
    assert find_pictures(tmp_path).files == []


def test_folders_are_left_out(tmp_path: Path) -> None:
    touch(tmp_path, "a.jpg", "sorted/cat/b.jpg")
    assert names(tmp_path, leave_out=[tmp_path / "sorted", tmp_path / "not there"]) == ["a.jpg"]
    assert names(tmp_path, leave_out=[tmp_path]) == ["a.jpg", "sorted/cat/b.jpg"]


def test_a_file_is_taken_whatever_its_ending(tmp_path: Path) -> None:
    touch(tmp_path, "upload")
    assert find_pictures(tmp_path / "upload").files == [tmp_path / "upload"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_told(tmp_path: Path) -> None:
    touch(tmp_path, "shut/a.jpg")
    (tmp_path / "shut").chmod(0)
    found = find_pictures(tmp_path)
    (tmp_path / "shut").chmod(0o700)
    assert found.unreadable == {tmp_path / "shut": "Permission denied"}


def test_classes_are_folders_and_their_pictures_lie_at_any_depth(tmp_path: Path) -> None:
    touch(tmp_path, "cat/a.jpg", "cat/2020/b.jpg", "dog/c.png", ".cache/d.jpg", "loose.jpg")
    found = find_classes(tmp_path)
    assert {name: [file.name for file in one.files] for name, one in found.items()} == {
        "cat": ["b.jpg", "a.jpg"],
        "dog": ["c.png"],
    }


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ((), "no class folders"),
        (("a.jpg",), "no class folders"),
        (("cat/a.jpg", "dog/notes.txt"), "dog has no images"),
    ],
)
def test_class_folders_that_cannot_be_used_are_named(tmp_path: Path, made: tuple[str, ...], said: str) -> None:
    (tmp_path / "few").mkdir()
    touch(tmp_path / "few", *made)
    with pytest.raises(DataError, match=said):
        find_classes(tmp_path / "few")


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    for find in (find_pictures, find_classes):
        with pytest.raises(DataError, match="nowhere"):
            find(tmp_path / "nowhere")
