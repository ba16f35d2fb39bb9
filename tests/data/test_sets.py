from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from npbml.data.sets import BENCHMARKS, NAMES, open_dataset
from npbml.data.store import ClassEntry, Store
from npbml.errors import DataError


def prepared(folder: Path) -> Store:
    images = np.zeros((3, 1, 4, 4), np.uint8)
    return Store.write(
        folder, name=folder.name, images=images, classes=[ClassEntry("a", "train", 0, 3)], provenance={}
    )


def test_glyphs_by_name(glyph_store: Store) -> None:
    opened = open_dataset("glyphs", root=glyph_store.folder.parent)
    assert (opened.folder, opened.checksum) == (glyph_store.folder, glyph_store.checksum)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_is_opened_where_it_is_prepared(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPBML_DATA", str(tmp_path))
    with pytest.raises(DataError, match=f"{name} is not prepared.*{tmp_path / name}.*glyphs"):
        open_dataset(name)
    prepared(tmp_path / name)
    assert open_dataset(name).name == name
    other = next(other for other in BENCHMARKS if other != name)
    with pytest.raises(DataError, match=f"Available are glyphs, {name},"):
        open_dataset(other)
    (tmp_path / name / "images.npy").unlink()
    with pytest.raises(DataError, match=r"images\.npy is missing"):
        open_dataset(name)


def test_a_path_is_the_users_pictures_or_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        (tmp_path / "mine" / name).mkdir(parents=True)
        Image.new("L", (5, 5), ord(name)).save(tmp_path / "mine" / name / "0.png")
    monkeypatch.setenv("NPBML_DATA", str(tmp_path / "stores"))
    store = open_dataset(str(tmp_path / "mine"), size=6, channels=3)
    assert store.images.shape == (3, 3, 6, 6)
    monkeypatch.chdir(tmp_path)
    assert open_dataset("mine", size=6, channels=3).folder == store.folder
    assert open_dataset(str(store.folder)).checksum == store.checksum


def test_unknown_names_are_told_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        open_dataset("mini-imagnet", root=tmp_path)
    assert "Did you mean 'mini-imagenet'?" in str(caught.value)
    assert all(name in str(caught.value) for name in NAMES)
    with pytest.raises(DataError, match=r"no folder .*/nowhere"):
        open_dataset(str(tmp_path / "nowhere"), root=tmp_path)
