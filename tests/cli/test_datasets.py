"""Data sets are prepared, checked and shown by command."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

Npbml = Callable[..., Any]


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """A folder of six class folders with four grey pictures each."""
    for number in range(6):
        (tmp_path / "pets" / f"kind {number}").mkdir(parents=True)
        for copy in range(4):
            Image.new("L", (20, 24), 20 * number + copy).save(tmp_path / "pets" / f"kind {number}" / f"{copy}.png")
    return tmp_path / "pets"


def test_data_is_prepared_checked_listed_and_shown(
    npbml_command: Npbml, pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPBML_DATA", str(tmp_path / "stores"))
    made = npbml_command("data", "prepare", "pets", "--source", pets, "--size", 16, "--seed", 1)
    assert made.code == 0 and "24 images of 2 train, 2 val, 2 test classes" in made.out
    checked = npbml_command("data", "check", "pets")
    assert checked.code == 0 and "train" in checked.out
    assert "pets" in npbml_command("data", "list").out
    shown = npbml_command("data", "show", "pets", "--split", "train", "--out", tmp_path / "sheet.png")
    assert shown.code == 0
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert min(sheet.size) > 50
    store = tmp_path / "stores" / "pets" / "images.npy"
    store.write_bytes(store.read_bytes()[:-1] + b"\x07")
    assert npbml_command("data", "check", "pets").code == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("data", "prepair"), "no `npbml data prepair`: choose from prepare"),
        (("data", "prepare", "cifar-fs", "--source", "nowhere"), "nowhere"),
        (("data", "check", "cifar-fs"), "`npbml data prepare cifar-fs --source PATH`"),
    ],
)
def test_data_that_is_not_there_is_named(
    npbml_command: Npbml, words: tuple[str, ...], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPBML_DATA", str(tmp_path))
    said = npbml_command(*words)
    assert said.code in (1, 2) and expected in said.error
