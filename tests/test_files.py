"""A file is whole or not there: the old content, or the new, and nothing beside it."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from npbml.errors import RunError
from npbml.files import load_tensors, read_json, save_tensors, write_json, write_whole


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


def test_missing_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"gone\.json is not there"):
        read_json(tmp_path / "gone.json")
    with pytest.raises(RunError, match=r"gone\.safetensors is not there"):
        load_tensors(tmp_path / "gone.safetensors")
    with pytest.raises(RunError, match="is not there"):
        load_tensors(tmp_path)


def test_tensors_of_every_kind_come_back_as_they_were(tmp_path: Path) -> None:
    grid = torch.arange(24.0).view(4, 6)
    tensors = {
        "plain": grid,
        "transposed": grid.t(),
        "strided": grid[::2, 1::3],
        "expanded": grid[0, :1].expand(5),
        "shared": grid,
        "view": grid[1],
        "scalar": torch.tensor(-0.0),
        "empty": torch.zeros(0, 3),
        "learned": torch.nn.Parameter(torch.randn(3)),
        "special": torch.tensor([float("nan"), float("inf"), 1e-45]),
        **{str(kind): torch.ones(2).to(kind) for kind in (torch.float64, torch.bfloat16, torch.int64, torch.bool)},
    }
    about = {"step": 3, "best": 51.25, "nested": {"list": [1, None, "ä"]}}
    save_tensors(tmp_path / "some.safetensors", tensors, about)
    loaded, told = load_tensors(tmp_path / "some.safetensors")
    assert told == about and set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        torch.testing.assert_close(loaded[name], tensor.detach(), rtol=0, atol=0, equal_nan=True)
    assert not loaded["learned"].requires_grad
    loaded["shared"].zero_()
    assert torch.equal(loaded["plain"], grid) and torch.equal(loaded["view"], grid[1])


def test_the_same_tensors_make_the_same_bytes(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(2), "a": torch.zeros(3)}
    save_tensors(tmp_path / "one", tensors, {"x": 1, "y": 2})
    save_tensors(tmp_path / "two", dict(reversed(tensors.items())), {"y": 2, "x": 1})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty", "foreign", "not json"])
def test_damaged_tensors_are_refused_by_name(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "some.safetensors"
    save_tensors(path, {"x": torch.ones(100)}, {})
    path.write_bytes(
        {
            "truncated": path.read_bytes()[:-1],
            "garbage": b"\x01" * 500,
            "empty": b"",
            "foreign": save({"x": torch.ones(2)}),
            "not json": save({"x": torch.ones(2)}, {"about": "{"}),
        }[damage]
    )
    with pytest.raises(RunError, match=r"some\.safetensors is damaged or not one of npbml's files"):
        load_tensors(path)


def test_what_is_about_the_tensors_is_readable_by_others(tmp_path: Path) -> None:
    """The header is plain safetensors: its length in eight bytes, then JSON."""
    save_tensors(tmp_path / "some", {"x": torch.ones(2)}, {"step": 7})
    content = (tmp_path / "some").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert json.loads(header["__metadata__"]["about"]) == {"step": 7}
