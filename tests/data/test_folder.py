import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from npbml.data.folder import folder_store
from npbml.data.store import SPLITS, Store
from npbml.errors import DataError


def picture(file: Path, value: int | tuple[int, ...] = 100, size: tuple[int, int] = (12, 9)) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(value, int) else "RGB" if len(value) == 3 else "RGBA", size, value).save(file)


def flat(root: Path, classes: int, images: int = 2) -> Path:
    for label in range(classes):
        for place in range(images):
            picture(root / "pets" / f"kind {label:02}" / f"{place}.png", 10 * label + place)
    return root / "pets"


def given(root: Path) -> Path:
    for split, names in (("train", "ab"), ("val", "c"), ("test", "de")):
        for name in names:
            for place in range(3):
                picture(root / "given" / split / name / f"{place}.png", (ord(name), place, 7))
    return root / "given"


def splits(store: Store) -> dict[str, set[str]]:
    return {split: {entry.name for entry in store.entries if entry.split == split} for split in SPLITS}


def test_a_folder_that_is_split(tmp_path: Path) -> None:
    store = folder_store(given(tmp_path), 8, root=tmp_path / "stores")
    assert splits(store) == {"train": {"a", "b"}, "val": {"c"}, "test": {"d", "e"}}
    assert store.images.shape == (15, 3, 8, 8)
    for entry in store.entries:
        for place in range(3):
            assert (store.images[entry.start + place, :, 0, 0] == [ord(entry.name), place, 7]).all()
    store.verify()
    np.testing.assert_allclose(store.mean, np.array([(97 + 98) / 2, 1, 7]) / 255)


def test_a_flat_folder_is_dealt_by_fraction_and_seed(tmp_path: Path) -> None:
    path = flat(tmp_path, 20)
    first = splits(folder_store(path, 4, root=tmp_path / "stores"))
    assert [len(first[split]) for split in SPLITS] == [12, 4, 4]
    assert len(set().union(*first.values())) == 20
    assert splits(folder_store(path, 4, root=tmp_path / "again")) == first
    assert splits(folder_store(path, 4, seed=1, root=tmp_path / "stores")) != first
    most = splits(folder_store(path, 4, fractions=(0.9, 0.05, 0.05), root=tmp_path / "stores"))
    assert [len(most[split]) for split in SPLITS] == [18, 1, 1]


@pytest.mark.parametrize("fractions", [(0.6, 0.2, 0.2), (0.1, 0.45, 0.45), (0.02, 0.49, 0.49), (0.98, 0.01, 0.01)])
def test_every_split_gets_a_class(tmp_path: Path, fractions: tuple[float, float, float]) -> None:
    for classes in (3, 4, 5):
        store = folder_store(
            flat(tmp_path / str(classes), classes), 4, fractions=fractions, root=tmp_path / "stores"
        )
        assert min(map(len, splits(store).values())) >= 1


def test_classes_called_train_and_test_are_classes(tmp_path: Path) -> None:
    for name in ("train", "test", "tram"):
        picture(tmp_path / "vehicles" / name / "0.png")
    assert {entry.name for entry in folder_store(tmp_path / "vehicles", 4, root=tmp_path).entries} == {
        "train",
        "test",
        "tram",
    }


def test_images_are_resized_as_pillow_does(tmp_path: Path) -> None:
    path = flat(tmp_path, 3)
    noise = np.random.default_rng(0).integers(0, 256, (30, 21, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path / "kind 00" / "0.png")
    store = folder_store(path, 10, root=tmp_path / "stores")
    entry = next(entry for entry in store.entries if entry.name == "kind 00")
    expected = np.asarray(Image.fromarray(noise).resize((10, 10), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(store.images[entry.start].transpose(1, 2, 0), expected)
    grey = folder_store(path, 10, channels=1, root=tmp_path / "stores")
    expected = np.asarray(Image.fromarray(noise).convert("L").resize((10, 10), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(grey.images[entry.start, 0], expected)


def test_channels_follow_the_pictures(tmp_path: Path) -> None:
    path = flat(tmp_path, 3)
    assert folder_store(path, 4, root=tmp_path / "stores").channels == 1
    assert folder_store(path, 4, channels=3, root=tmp_path / "stores").channels == 3
    picture(path / "kind 01" / "colour.jpg", (200, 10, 10))
    assert folder_store(path, 4, root=tmp_path / "stores").channels == 3


def test_sixteen_bits_are_grey_in_every_format(tmp_path: Path) -> None:
    path, deep = flat(tmp_path, 3), np.full((9, 12), 200 * 256 + 77, dtype=np.uint16)
    for suffix in (".png", ".tif", ".pgm"):
        Image.fromarray(deep).save(path / "kind 00" / f"deep{suffix}")
    store = folder_store(path, 4, root=tmp_path / "stores")
    assert store.channels == 1 and (store.images == 200).all((1, 2, 3)).sum() == 3


def test_unusual_pictures_keep_their_meaning(tmp_path: Path) -> None:
    path = flat(tmp_path, 3, images=1)
    picture(path / "kind 00" / "0.png", (10, 20, 30, 0))
    deep = np.full((9, 12), 200 * 256 + 77, dtype=np.uint16)
    Image.fromarray(deep).save(path / "kind 01" / "0.png")
    sideways = Image.new("L", (8, 4), 0)
    sideways.paste(255, (0, 0, 4, 4))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned a quarter clockwise
    sideways.save(path / "kind 02" / "0.png", exif=exif)
    store = folder_store(path, 4, channels=1, root=tmp_path / "stores")
    starts = {entry.name: entry.start for entry in store.entries}
    assert (store.images[starts["kind 00"]] == 255).all()
    assert (store.images[starts["kind 01"]] == 200).all()
    assert store.images[starts["kind 02"], 0, 0, 0] > 200 > 50 > store.images[starts["kind 02"], 0, 3, 0]


def test_files_that_are_no_images_do_not_count(tmp_path: Path) -> None:
    path = flat(tmp_path, 3)
    for name in (".DS_Store", "Thumbs.db", "notes.txt", "._0.png"):
        (path / "kind 00" / name).write_bytes(b"junk")
    (path / ".git").mkdir()
    (path / "__MACOSX").mkdir()
    (path / "readme.png.txt").write_text("junk")
    assert len(folder_store(path, 4, root=tmp_path / "stores").images) == 6


def test_the_store_is_made_again_only_when_something_changed(tmp_path: Path) -> None:
    path, told = flat(tmp_path, 3), []

    def make(**options: object) -> Store:
        arguments = {"size": 4, "root": tmp_path / "stores"} | options
        return folder_store(path, **arguments, progress=lambda *done: told.append(done))  # type: ignore[arg-type]

    make()
    assert told == [(1, 3), (2, 3), (3, 3)]
    make()
    assert len(told) == 3
    os.utime(path / "kind 00" / "0.png", ns=(1, 1))
    make()
    assert len(told) == 6
    picture(path / "kind 00" / "new.png", 251)
    assert 251 in make().images
    make(size=5)
    make(channels=3)
    assert len(told) == 15
    store = make()
    (store.folder / "store.json").unlink()
    make().verify()
    assert len(told) == 18


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"no folder {tmp_path}/nowhere"):
        folder_store(tmp_path / "nowhere", 4)


def test_an_empty_class_folder_is_named(tmp_path: Path) -> None:
    path = flat(tmp_path, 3)
    (path / "kind 99").mkdir()
    (path / "kind 99" / "Thumbs.db").write_bytes(b"junk")
    with pytest.raises(DataError, match=r"kind 99 has no images"):
        folder_store(path, 4, root=tmp_path / "stores")


@pytest.mark.parametrize("channels", [None, 1])
@pytest.mark.parametrize("damage", ["empty", "text", "cut"])
def test_a_corrupt_image_is_named_and_nothing_is_left(tmp_path: Path, damage: str, channels: int | None) -> None:
    path = flat(tmp_path, 3)
    bad = path / "kind 01" / "bad.jpg"
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).save(bad)
    whole = bad.read_bytes()
    bad.write_bytes({"empty": b"", "text": b"not an image", "cut": whole[: len(whole) // 2]}[damage])
    with pytest.raises(DataError, match=r"kind 01/bad\.jpg cannot be read"):
        folder_store(path, 4, channels=channels, root=tmp_path / "stores")
    assert not list((tmp_path / "stores").glob("*"))


def test_pixels_without_a_range_are_refused(tmp_path: Path) -> None:
    path = flat(tmp_path, 3)
    Image.new("F", (5, 5), 0.5).save(path / "kind 01" / "float.tif")
    with pytest.raises(DataError, match=r"float\.tif has pixels of mode 'F'"):
        folder_store(path, 4, root=tmp_path / "stores")


def test_no_class_folders_at_all(tmp_path: Path) -> None:
    picture(tmp_path / "loose" / "0.png")
    with pytest.raises(DataError, match="loose has no class folders"):
        folder_store(tmp_path / "loose", 4)


def test_too_few_classes_to_split(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"2 class folders \(kind 00, kind 01\).*3 in all"):
        folder_store(flat(tmp_path, 2), 4)


def test_a_split_that_is_missing_or_empty(tmp_path: Path) -> None:
    path = given(tmp_path)
    (path / "val").rename(path / ".val")
    with pytest.raises(DataError, match=r"given/val is missing"):
        folder_store(path, 4)
    (path / "val").mkdir()
    with pytest.raises(DataError, match="given/val has no class folders"):
        folder_store(path, 4)


def test_a_class_in_two_splits(tmp_path: Path) -> None:
    path = given(tmp_path)
    picture(path / "test" / "a" / "0.png")
    with pytest.raises(DataError, match=r"'a' is in two splits.*train/a.*test/a"):
        folder_store(path, 4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"size": 0}, "size is 0"),
        ({"channels": 2}, "channels is 2"),
        ({"fractions": (0.5, 0.5, 0.5)}, "fractions is .*add up to 1"),
        ({"fractions": (1.0, 0.0, 0.0)}, "fractions is"),
        ({"fractions": (0.5, 0.5)}, "fractions is"),
    ],
)
def test_impossible_options_are_named(tmp_path: Path, options: dict[str, object], said: str) -> None:
    with pytest.raises(DataError, match=said):
        folder_store(flat(tmp_path, 3), **({"size": 4} | options))  # type: ignore[arg-type]
