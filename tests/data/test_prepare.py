import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from npbml.data import prepare as prepare_module
from npbml.data.benchmarks import Benchmark
from npbml.data.prepare import prepare
from npbml.data.sets import open_dataset, prepared
from npbml.data.store import SPLITS, Store
from npbml.errors import DataError


def own_pictures(folder: Path, classes: int = 5) -> Path:
    for label in range(classes):
        (folder / f"kind {label}").mkdir(parents=True)
        for place in range(2):
            Image.new("RGB", (9, 7), (label, place, 50)).save(folder / f"kind {label}" / f"{place}.png")
    return folder


@pytest.fixture
def mini(tmp_path: Path, small: Callable[..., Benchmark]) -> Path:
    """A small mini-ImageNet in folders."""
    benchmark = small("mini-imagenet", 2, 2, 1, 1)
    for number, (name, split) in enumerate(benchmark.split_of().items()):
        folder = tmp_path / "mini" / split / name
        folder.mkdir(parents=True)
        for place in range(2):
            Image.new("RGB", (84, 84), (number, place, 9)).save(folder / f"{place}.png")
    return tmp_path / "mini"


def files(store: Store) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in store.folder.iterdir()}


def test_preparing_twice_gives_the_same_store(tmp_path: Path, mini: Path) -> None:
    first = files(prepare("mini-imagenet", mini, tmp_path / "a"))
    assert files(prepare("mini-imagenet", mini, tmp_path / "a")) == first
    assert files(prepare("mini-imagenet", mini, tmp_path / "b")) == first
    assert sorted(first) == ["images.npy", "store.json"]


def test_provenance_is_names_and_sizes(tmp_path: Path, mini: Path) -> None:
    store = prepare("mini-imagenet", mini, tmp_path / "a")
    sizes = {str(file.relative_to(mini)): file.stat().st_size for file in mini.rglob("*.png")}
    assert {item["name"]: item["bytes"] for item in store.provenance["files"]} == sizes
    assert store.provenance["layout"] == "class folders"
    assert str(tmp_path) not in json.dumps(dict(store.provenance))


def test_the_prepared_set_is_opened_by_its_name(
    tmp_path: Path, mini: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPBML_DATA", str(tmp_path / "data"))
    told: list[tuple[int, int]] = []
    store = prepare("mini-imagenet", mini, progress=lambda *done: told.append(done))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert open_dataset("mini-imagenet").checksum == store.checksum
    own = prepare("pets", own_pictures(tmp_path / "in"), size=6)
    assert open_dataset("pets").checksum == own.checksum
    assert prepared() == ["mini-imagenet", "pets"]


class Stop(BaseException):
    """As when the user presses Ctrl-C."""


def test_an_interrupted_preparation_is_never_used(
    tmp_path: Path, mini: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(done: int, total: int) -> None:
        if done == 2:
            raise Stop

    root = tmp_path / "stores"
    with pytest.raises(Stop):
        prepare("mini-imagenet", mini, root, progress=stop)
    assert not list(root.iterdir())
    with pytest.raises(DataError, match="not prepared"):
        open_dataset("mini-imagenet", root=root)
    whole = prepare("mini-imagenet", mini, root)
    with pytest.raises(Stop):
        prepare("mini-imagenet", mini, root, progress=stop)
    assert Store.open(root / "mini-imagenet").checksum == whole.checksum  # the one before is still there
    # A killed process cannot tidy up: what it leaves is not taken for a store, and the next one starts afresh.
    left = root / f"other{prepare_module.HALF_MADE}123"
    left.mkdir()
    (left / "images.npy").write_bytes(b"half")
    assert prepared(root) == ["mini-imagenet"]


def test_own_pictures_are_dealt_by_fraction_and_seed(tmp_path: Path) -> None:
    source = own_pictures(tmp_path / "in", 10)
    store = prepare("pets", source, tmp_path / "a", size=8, fractions=(0.5, 0.2, 0.3), seed=3)
    assert [sum(entry.split == split for entry in store.entries) for split in SPLITS] == [5, 2, 3]
    assert store.images.shape == (20, 3, 8, 8)
    assert files(prepare("pets", source, tmp_path / "b", size=8, fractions=(0.5, 0.2, 0.3), seed=3)) == files(
        store
    )
    other = prepare("pets", source, tmp_path / "a", size=8, fractions=(0.5, 0.2, 0.3), seed=4)
    assert other.entries != store.entries
    assert prepare("pets", source, tmp_path / "a").size == 84
    assert prepare("pets", source, tmp_path / "a", channels=1).channels == 1


def test_own_pictures_in_an_archive(tmp_path: Path) -> None:
    source = own_pictures(tmp_path / "in" / "pictures")
    with zipfile.ZipFile(tmp_path / "pets.zip", "w") as packed:
        for file in source.rglob("*.png"):
            packed.write(file, str(file.relative_to(tmp_path / "in")))
    loose = prepare("pets", tmp_path / "in", tmp_path / "a", size=8)
    store = prepare("pets", tmp_path / "pets.zip", tmp_path / "b", size=8)
    assert (store.checksum, store.entries) == (loose.checksum, loose.entries)
    assert store.provenance["files"][0]["name"] == "pets.zip"
    assert [item.name for item in (tmp_path / "b").iterdir()] == ["pets"]


@pytest.mark.parametrize("name", ["glyphs", "folder-x", "a/b", "..", "", "über", "glyphs-2"])
def test_names_that_cannot_be_used(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be the name of a data set.*mini-imagenet"):
        prepare(name, own_pictures(tmp_path / "in"), tmp_path / "a")


def test_sources_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("no archive")
    with pytest.raises(DataError, match=r"note\.txt is neither a folder nor an archive"):
        prepare("pets", tmp_path / "note.txt", tmp_path / "a")
    with pytest.raises(DataError, match=r"There is no .*nowhere"):
        prepare("pets", tmp_path / "nowhere", tmp_path / "a")
    with pytest.raises(DataError, match="size is 0"):
        prepare("pets", own_pictures(tmp_path / "in"), tmp_path / "a", size=0)
    assert not (tmp_path / "a").exists()
