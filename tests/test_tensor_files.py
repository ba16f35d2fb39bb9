"""Tensors in files: they come back as they were, and what is damaged is refused by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from npbml.errors import RunError
from npbml.tensor_files import digest, load_tensors, save_tensors


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
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
    about = json.loads(header["__metadata__"]["about"])
    assert about.pop("sha256") == digest({"x": torch.ones(2)}, {"step": 7}) and about == {"step": 7}
