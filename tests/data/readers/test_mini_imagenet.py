import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from npbml.data.benchmarks import Benchmark
from npbml.data.prepare import prepare
from npbml.data.store import SPLITS, Store
from npbml.errors import DataError

Images = dict[str, np.ndarray]


@pytest.fixture
def benchmark(small: Callable[..., Benchmark]) -> Benchmark:
    return small("mini-imagenet", 4, 3, 2, 2)


@pytest.fixture
def images(benchmark: Benchmark) -> Images:
    random = np.random.default_rng(0)
    return {name: random.integers(0, 256, (4, 84, 84, 3), dtype=np.uint8) for name in benchmark.split_of()}


def write_cache(folder: Path, benchmark: Benchmark, images: Images, as_bytes: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        names = list(benchmark.classes[split])
        order = np.random.default_rng(1).permutation(4 * len(names))
        rows = {
            name: [int(np.flatnonzero(order == 4 * n + i)[0]) for i in range(4)] for n, name in enumerate(names)
        }
        cache = {"image_data": np.concatenate([images[name] for name in names])[order], "class_dict": rows}
        if as_bytes:
            cache = {key.encode(): value for key, value in cache.items()}
            cache[b"class_dict"] = {name.encode(): np.array(places) for name, places in rows.items()}
        with open(folder / f"mini-imagenet-cache-{split}.pkl", "wb") as file:
            pickle.dump(cache, file, 2 if as_bytes else 4)
    return folder


def write_csv(folder: Path, benchmark: Benchmark, images: Images) -> Path:
    (folder / "images").mkdir(parents=True)
    for split in SPLITS:
        rows = ["filename,label"]
        for name in benchmark.classes[split]:
            for place, image in enumerate(images[name]):
                Image.fromarray(image).save(folder / "images" / f"{name}{place:08}.png")
                rows.append(f"{name}{place:08}.png,{name}")
        (folder / f"{split}.csv").write_text("\n".join(rows) + "\n")
    return folder


def write_folders(folder: Path, benchmark: Benchmark, images: Images) -> Path:
    for split in SPLITS:
        for name in benchmark.classes[split]:
            (folder / split / name).mkdir(parents=True)
            for place, image in enumerate(images[name]):
                Image.fromarray(image).save(folder / split / name / f"{place}.png")
    return folder


def zipped(folder: Path) -> Path:
    archive = folder.parent / "mini-imagenet.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for file in sorted(folder.rglob("*")):
            packed.write(file, f"mini/{file.relative_to(folder)}")
    return archive


def assert_holds(store: Store, benchmark: Benchmark, images: Images) -> None:
    assert [entry.name for entry in store.entries] == list(benchmark.split_of())
    for entry in store.entries:
        assert (entry.split, entry.count) == (benchmark.split_of()[entry.name], 4)
        np.testing.assert_array_equal(
            store.images[entry.start : entry.start + 4], images[entry.name].transpose(0, 3, 1, 2)
        )
    assert (store.mean, store.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.mark.parametrize("write", [write_cache, write_csv, write_folders])
@pytest.mark.parametrize("how", ["folder", "above", "zip", "folder with zip"])
def test_every_layout_makes_the_same_store(
    write: Callable[..., Path], how: str, tmp_path: Path, benchmark: Benchmark, images: Images
) -> None:
    source = write(tmp_path / "in" / "data", benchmark, images)
    if how == "above":
        source = tmp_path / "in"
    elif "zip" in how:
        archive = zipped(source)
        shutil.rmtree(source)
        source = archive if how == "zip" else archive.parent
    assert_holds(prepare("mini-imagenet", source, tmp_path / "stores"), benchmark, images)


def test_keys_of_python_2(tmp_path: Path, benchmark: Benchmark, images: Images) -> None:
    source = write_cache(tmp_path / "in", benchmark, images, as_bytes=True)
    assert_holds(prepare("mini-imagenet", source, tmp_path / "stores"), benchmark, images)
    one = source / "mini-imagenet-cache-train.pkl"
    assert_holds(prepare("mini-imagenet", one, tmp_path / "stores"), benchmark, images)


@pytest.mark.parametrize("write", [write_cache, write_csv])
def test_other_sizes(write: Callable[..., Path], tmp_path: Path, benchmark: Benchmark, images: Images) -> None:
    store = prepare("mini-imagenet", write(tmp_path / "in", benchmark, images), tmp_path / "stores", size=40)
    entry = store.entries[3]
    expected = Image.fromarray(images[entry.name][2]).resize((40, 40), Image.Resampling.LANCZOS)
    np.testing.assert_array_equal(store.images[entry.start + 2].transpose(1, 2, 0), np.asarray(expected))


def test_large_and_grey_pictures_become_colour_of_one_size(
    tmp_path: Path, benchmark: Benchmark, images: Images
) -> None:
    source = write_folders(tmp_path / "in", benchmark, images)
    name = next(iter(benchmark.classes["train"]))
    grey = np.random.default_rng(2).integers(0, 256, (120, 200), dtype=np.uint8)
    Image.fromarray(grey).save(source / "train" / name / "0.png")
    store = prepare("mini-imagenet", source, tmp_path / "stores")
    expected = Image.fromarray(grey).convert("RGB").resize((84, 84), Image.Resampling.LANCZOS)
    np.testing.assert_array_equal(store.images[0].transpose(1, 2, 0), np.asarray(expected))


def refused(source: Path, root: Path, said: str) -> None:
    with pytest.raises(DataError, match=said):
        prepare("mini-imagenet", source, root)
    assert not root.exists() or not list(root.iterdir())


def change(file: Path, change: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
    cache = pickle.loads(file.read_bytes())
    change(cache)
    file.write_bytes(pickle.dumps(cache))


def test_errors_in_the_cache(tmp_path: Path, benchmark: Benchmark, images: Images) -> None:
    root, source = tmp_path / "stores", tmp_path / "in"
    val = source / "mini-imagenet-cache-val.pkl"
    name = next(iter(benchmark.classes["val"]))

    def broken(edit: Callable[[dict], object], said: str) -> None:  # type: ignore[type-arg]
        change(write_cache(source, benchmark, images) / val.name, edit)
        refused(source, root, said)

    broken(lambda cache: cache["class_dict"].pop(name), rf"cache-val\.pkl lacks '{name}' of the 2 classes")
    broken(
        lambda cache: cache["class_dict"][name].pop(), rf"cache-val\.pkl holds 3 images of class '{name}'.* 4 of"
    )
    broken(lambda cache: cache["class_dict"].update({name: [0, 1, 2, 99]}), r"cache-val\.pkl: class_dict .*of 8")
    broken(
        lambda cache: cache.pop("image_data"), r"cache-val\.pkl has the keys class_dict; expected is image_data"
    )
    broken(lambda cache: cache.update(image_data=np.zeros((8, 84, 84), np.uint8)), r"\[8, 84, 84\].*colour images")
    broken(lambda cache: cache.update(image_data=np.zeros((8, 84, 84, 1), np.uint8)), "colour images")
    broken(lambda cache: cache.update(image_data=np.zeros((8, 84, 84, 3))), "float64")
    val.write_bytes(val.read_bytes()[:-500])
    refused(source, root, r"cache-val\.pkl cannot be read as a pickle")
    val.unlink()
    refused(source, root, r"cache-train\.pkl is there, and mini-imagenet-cache-val\.pkl is missing")


def test_errors_in_the_csv_files(tmp_path: Path, benchmark: Benchmark, images: Images) -> None:
    root, source = tmp_path / "stores", write_csv(tmp_path / "in", benchmark, images)
    name = next(iter(benchmark.classes["test"]))
    rows = (source / "test.csv").read_text()
    lines = rows.splitlines()
    (source / "test.csv").write_text("\n".join(lines[:1] + lines[2:]))
    refused(source, root, rf"test\.csv holds 3 images of class '{name}'.* 4 of every class")
    (source / "test.csv").write_text("\n".join(lines[:1] + lines[5:]))
    refused(source, root, rf"test\.csv lacks '{name}'")
    (source / "test.csv").write_text(rows.replace("filename", "file"))
    refused(source, root, r"test\.csv, line 2, has no filename and label")
    (source / "test.csv").write_text(rows)
    (source / "images" / f"{name}00000002.png").unlink()
    refused(source, root, rf"test\.csv, line 4, names the picture {name}00000002\.png, which is not in")
    (source / "test.csv").unlink()
    refused(source, root, r"train\.csv, val\.csv and test\.csv are expected together")


def test_errors_in_the_folders(tmp_path: Path, benchmark: Benchmark, images: Images) -> None:
    root, source = tmp_path / "stores", write_folders(tmp_path / "in", benchmark, images)
    name = next(iter(benchmark.classes["test"]))
    whole = (source / "test" / name / "3.png").read_bytes()
    (source / "test" / name / "3.png").write_bytes(whole[: len(whole) // 2])
    refused(source, root, rf"test/{name}/3\.png cannot be read as an image")
    (source / "test" / name / "3.png").unlink()
    refused(source, root, rf"holds 3 images of class '{name}'")
    (source / "test" / name).rename(source / "val" / name)
    refused(source, root, rf"val/{name}/0\.png is in the val split, and class '{name}' belongs to test")
    shutil.rmtree(source / "val" / name)
    refused(source, root, rf"lacks '{name}' of the 7 classes of mini-imagenet")


def test_a_corrupt_picture_in_a_zip_is_named(tmp_path: Path, benchmark: Benchmark, images: Images) -> None:
    source = write_csv(tmp_path / "in" / "data", benchmark, images)
    (source / "images" / sorted(file.name for file in (source / "images").iterdir())[0]).write_bytes(b"no picture")
    refused(
        zipped(source), tmp_path / "stores", r"images/n\d+\.png in .*mini-imagenet\.zip cannot be read as an image"
    )


def test_another_data_set(tmp_path: Path, benchmark: Benchmark) -> None:
    (tmp_path / "in").mkdir()
    refused(tmp_path / "in", tmp_path / "stores", "holds no files, and no layout of mini-imagenet is in it")
    (tmp_path / "in" / "train_images_png.pkl").write_bytes(b"")
    refused(
        tmp_path / "in",
        tmp_path / "stores",
        r"looks like tiered-ImageNet \(pickles\).*Expected: mini-imagenet-cache",
    )
    refused(tmp_path / "nowhere", tmp_path / "stores", "There is no .*nowhere")
