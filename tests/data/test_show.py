from pathlib import Path

import numpy as np
import pytest

from npbml.data.show import contact_sheet
from npbml.data.store import ClassEntry, Store
from npbml.errors import DataError


def plain(folder: Path, channels: int = 3, name: str = "class") -> Store:
    """Five classes of four images, each of one colour of its own."""
    values = np.arange(20, dtype=np.uint8) * 10 + 5
    images = np.broadcast_to(values[:, None, None, None], (20, channels, 16, 16)).copy()
    images[:, 1:] = 7
    entries = [ClassEntry(f"{name} {n}", "train" if n else "test", 4 * n, 4) for n in range(5)]
    return Store.write(folder, name="some", images=images, classes=entries, provenance={})


def colours(sheet: np.ndarray) -> set[tuple[int, ...]]:
    """Those that fill at least an image."""
    found, counts = np.unique(sheet.reshape(-1, 3), axis=0, return_counts=True)
    return {tuple(map(int, colour)) for colour, count in zip(found, counts, strict=True) if count >= 56 * 56}


@pytest.mark.parametrize("channels", [1, 3])
def test_every_class_and_image_is_on_the_sheet(tmp_path: Path, channels: int) -> None:
    store = plain(tmp_path / "a", channels)
    shown = colours(np.asarray(contact_sheet(store, "train", classes=9, images=9)))
    other = (7, 7) if channels == 3 else ()
    expected = {(value, *other) if other else (value,) * 3 for value in range(45, 205, 10)}
    assert expected <= shown
    assert not {(value, *other) if other else (value,) * 3 for value in range(5, 45, 10)} & shown


def test_the_sheet_is_drawn_by_its_seed(tmp_path: Path) -> None:
    store = plain(tmp_path / "a")
    sheets = [np.asarray(contact_sheet(store, "train", 2, 2, seed)) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(sheets[0], sheets[1])
    assert colours(sheets[0]) != colours(sheets[2])
    assert len(colours(sheets[0]) - {(220, 220, 220)}) == 4


def test_names_have_room(tmp_path: Path) -> None:
    short = contact_sheet(plain(tmp_path / "a"), "train", 2, 2)
    long = contact_sheet(plain(tmp_path / "b", name="a much longer name of a class"), "train", 2, 2)
    endless = contact_sheet(plain(tmp_path / "c", name="endless " * 50), "train", 2, 2)
    assert short.width < long.width < endless.width < 1000
    assert (np.asarray(short)[:, :60] < 100).any()


def test_empty_sheets_are_refused(tmp_path: Path) -> None:
    store = plain(tmp_path / "a")
    with pytest.raises(DataError, match="no classes in its split 'val'"):
        contact_sheet(store, "val")
    with pytest.raises(DataError, match="empty"):
        contact_sheet(store, "train", classes=0)
