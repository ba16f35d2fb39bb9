import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from npbml.data import store as store_module
from npbml.data.store import SPLITS, ClassEntry, Store, data_root
from npbml.errors import DataError

CLASSES = (
    ClassEntry("cat", "train", 0, 3, "animal"),
    ClassEntry("car", "test", 3, 2, "thing"),
    ClassEntry("dog", "train", 5, 4, "animal"),
    ClassEntry("cup", "val", 9, 1, "thing"),
)


def some_images(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (10, 3, 6, 6), dtype=np.uint8)


def write(folder: Path, images: np.ndarray | None = None, **more: object) -> Store:
    arguments = {"name": "some", "classes": CLASSES, "provenance": {"seed": 7}} | more
    return Store.write(folder, images=some_images() if images is None else images, **arguments)  # type: ignore[arg-type]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    images = some_images()
    written, read = write(tmp_path / "a", images), Store.open(tmp_path / "a")
    for store in (written, read):
        np.testing.assert_array_equal(store.images, images)
        assert (store.name, store.entries, store.provenance) == ("some", CLASSES, {"seed": 7})
        assert (store.channels, store.size) == (3, 6)
    assert isinstance(read.images, np.memmap)
    read.verify()


def test_mean_and_std_are_those_of_the_train_split(tmp_path: Path) -> None:
    images = some_images()
    store = write(tmp_path / "a", images)
    train = images[[0, 1, 2, 5, 6, 7, 8]] / 255
    np.testing.assert_allclose(store.mean, train.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(store.std, train.std((0, 2, 3)), rtol=1e-12)


def test_pieces_make_the_same_store_as_the_whole(tmp_path: Path) -> None:
    images = some_images()
    whole = write(tmp_path / "a", images)
    pieces = Store.write(
        tmp_path / "b",
        name="some",
        images=iter([images[:4], images[4:5], images[5:]]),
        shape=images.shape,
        classes=CLASSES,
        provenance={"seed": 7},
    )
    assert pieces.checksum == whole.checksum
    assert (tmp_path / "a/images.npy").read_bytes() == (tmp_path / "b/images.npy").read_bytes()
    assert (tmp_path / "a/store.json").read_bytes() == (tmp_path / "b/store.json").read_bytes()


def test_classes_of_a_split(tmp_path: Path) -> None:
    images = some_images()
    train = write(tmp_path / "a", images).classes("train")
    assert train.names == ("cat", "dog")
    assert train.labels.tolist() == [0] * 3 + [1] * 4
    np.testing.assert_array_equal(train.images.numpy(), images[[0, 1, 2, 5, 6, 7, 8]])
    for place, start, count in zip(range(2), train.starts, train.counts, strict=True):
        assert (train.labels[start : start + count] == place).all()


def test_splits_share_no_class(tmp_path: Path) -> None:
    store = write(tmp_path / "a")
    names = [name for split in ("train", "val", "test") for name in store.classes(split).names]  # type: ignore[arg-type]
    assert sorted(names) == sorted(entry.name for entry in CLASSES)
    with pytest.raises(DataError, match="two classes called 'cat'"):
        write(tmp_path / "b", classes=[*CLASSES[:3], ClassEntry("cat", "val", 9, 1)])


@pytest.mark.parametrize(
    ("classes", "said"),
    [
        ([ClassEntry("cat", "train", 0, 9)], "9 images in all, and there are 10"),
        ([ClassEntry("cat", "train", 0, 3), ClassEntry("dog", "val", 4, 6)], "'dog'.*image 3"),
        ([ClassEntry("cat", "train", 0, 10), ClassEntry("dog", "val", 10, 0)], "'dog'.*0 images"),
        ([ClassEntry("cat", "trian", 0, 10)], "'cat'.*'trian'"),  # type: ignore[arg-type]
    ],
)
def test_classes_must_tile_the_images(tmp_path: Path, classes: list[ClassEntry], said: str) -> None:
    with pytest.raises(DataError, match=said):
        write(tmp_path / "a", classes=classes)
    assert not list(tmp_path.iterdir())


class Stop(BaseException):
    pass


def test_an_interrupted_write_leaves_nothing_and_is_redone(tmp_path: Path) -> None:
    images = some_images()

    def interrupted():  # type: ignore[no-untyped-def]
        yield images[:4]
        raise Stop

    with pytest.raises(Stop):
        Store.write(
            tmp_path / "a",
            name="some",
            images=interrupted(),
            shape=images.shape,
            classes=CLASSES,
            provenance={},
        )
    assert not list(tmp_path.iterdir())
    np.testing.assert_array_equal(write(tmp_path / "a", images).images, images)


@pytest.mark.parametrize("stage", ["moments", "_replace"])
def test_a_write_killed_at_any_stage_is_never_used(
    tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(store_module, stage, killed)
        patch.setattr(store_module.shutil, "rmtree", lambda *_, **__: None)  # a kill -9 cleans nothing up
        with pytest.raises(Stop):
            write(tmp_path / "a")
    assert list(tmp_path.iterdir())
    with pytest.raises(DataError, match=r"a/store\.json is missing"):
        Store.open(tmp_path / "a")
    write(tmp_path / "a").verify()


def test_what_a_killed_write_left_is_swept_after_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.making-0").mkdir()
    (tmp_path / "a.making-0" / "images.npy").write_bytes(b"half")
    write(tmp_path / "a")
    assert (tmp_path / "a.making-0").exists()
    now = time.time()
    monkeypatch.setattr(store_module.time, "time", lambda: now + 2 * 86400)
    write(tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_store_is_replaced_whole(tmp_path: Path) -> None:
    old = write(tmp_path / "a")
    new = write(tmp_path / "a", some_images(1))
    np.testing.assert_array_equal(new.images, some_images(1))
    np.testing.assert_array_equal(old.images, some_images())  # whoever has it open keeps it
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module, "_sync", full)
    with pytest.raises(DataError, match=r"No space left.*NPBML_DATA"):
        write(tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_one_changed_byte_is_found(tmp_path: Path) -> None:
    store = write(tmp_path / "a")
    store.verify()
    file = tmp_path / "a" / "images.npy"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"images\.npy is damaged"):
        Store.open(tmp_path / "a").verify()


def test_missing_or_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere/store\.json is missing"):
        Store.open(tmp_path / "nowhere")
    folder = tmp_path / "a"
    write(folder)
    index, pixels = (folder / "store.json").read_text(), (folder / "images.npy").read_bytes()

    for damaged in (pixels[:-1], pixels[:20], b""):
        (folder / "images.npy").write_bytes(damaged)
        with pytest.raises(DataError, match=r"images\.npy is damaged"):
            Store.open(folder)
    np.save(folder / "images.npy", np.zeros((10, 3, 6, 5), np.uint8))
    with pytest.raises(DataError, match=r"images\.npy holds uint8 \[10, 3, 6, 5\].*\[10, 3, 6, 6\]"):
        Store.open(folder)
    (folder / "images.npy").unlink()
    with pytest.raises(DataError, match=r"images\.npy is missing"):
        Store.open(folder)

    (folder / "images.npy").write_bytes(pixels)
    entry = '"name": "dog"'
    for damaged_index in (
        index[:-20],
        "[]",
        index.replace(entry, '"nome": "dog"'),
        index.replace('"start": 5', '"start": "x"'),
    ):
        (folder / "store.json").write_text(damaged_index)
        with pytest.raises(DataError, match=r"store\.json"):
            Store.open(folder)
    other = {name: value for name, value in json.loads(index).items() if name != "sha256"}
    (folder / "store.json").write_text(json.dumps(other | {"format": 99}))
    with pytest.raises(DataError, match="format 99"):
        Store.open(folder)


def test_a_split_without_classes_is_named(tmp_path: Path) -> None:
    store = write(tmp_path / "a", classes=[ClassEntry("cat", "test", 0, 10)])
    with pytest.raises(DataError, match="no classes in its val split"):
        store.classes("val")
    with pytest.raises(DataError, match="no split 'valid'; it has train, val, test"):
        store.classes("valid")  # type: ignore[arg-type]
    np.testing.assert_allclose(store.mean, some_images().mean((0, 2, 3)) / 255)


def test_a_constant_image_can_still_be_normalised(tmp_path: Path) -> None:
    store = write(tmp_path / "a", np.full((10, 3, 6, 6), 9, np.uint8))
    assert torch.isfinite(store.classes("train").batch(torch.arange(3))).all()


def test_opening_takes_milliseconds(tmp_path: Path) -> None:
    entries = [ClassEntry(str(place), "train", place * 30, 30) for place in range(1000)]
    write(tmp_path / "a", np.zeros((30000, 1, 28, 28), np.uint8), classes=entries)
    start = time.perf_counter()
    for _ in range(5):
        Store.open(tmp_path / "a")
    assert (time.perf_counter() - start) / 5 < 0.1


def test_where_stores_live(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NPBML_DATA", str(tmp_path / "mine"))
    assert data_root() == tmp_path / "mine"
    monkeypatch.delenv("NPBML_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_root() == tmp_path / "cache" / "npbml"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_root() == tmp_path / ".cache" / "npbml"


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("place", [-1, -200, -600])
def test_an_image_that_has_changed_is_not_trained_on(tmp_path: Path, place: int) -> None:
    write(tmp_path / "a")
    flip(tmp_path / "a" / "images.npy", place)
    store = Store.open(tmp_path / "a")
    with pytest.raises(DataError, match=r"images\.npy is damaged: its (train|val|test) images are not those"):
        [store.classes(split) for split in SPLITS if any(entry.split == split for entry in store.entries)]


@pytest.mark.parametrize("word", ['"mean"', "0.", "dog", '"start": 5', "checksum"])
def test_an_index_that_has_changed_is_refused(tmp_path: Path, word: str) -> None:
    index = tmp_path / "a" / "store.json"
    write(tmp_path / "a")
    flip(index, index.read_text().index(word) + len(word) - 1)
    with pytest.raises(DataError, match=r"store\.json"):
        Store.open(tmp_path / "a")


def test_stores_without_digests_are_read(tmp_path: Path) -> None:
    store = write(tmp_path / "a")
    index = tmp_path / "a" / "store.json"
    data = json.loads(index.read_text())
    del data["digests"], data["sha256"]
    index.write_text(json.dumps(data))
    old = Store.open(tmp_path / "a")
    assert old.entries == store.entries and not old.digests
    assert torch.equal(old.classes("train").images, store.classes("train").images)
