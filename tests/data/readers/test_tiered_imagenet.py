import io
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from npbml.data.benchmarks import Benchmark
from npbml.data.prepare import prepare
from npbml.data.store import SPLITS, Store
from npbml.errors import DataError

Data = dict[str, tuple[list[str], np.ndarray, np.ndarray]]


@pytest.fixture
def benchmark(small: Callable[..., Benchmark]) -> Benchmark:
    return small("tiered-imagenet", None, 4, 2, 3, totals={"train": 14, "val": 5, "test": 9})


@pytest.fixture
def data(benchmark: Benchmark) -> Data:
    """Class codes, labels and images in red, green, blue, by split; classes differ in their number of images."""
    random = np.random.default_rng(0)
    made: Data = {}
    for split in SPLITS:
        codes = list(benchmark.classes[split])[::-1]
        total = (benchmark.totals or {})[split]
        labels = np.concatenate([np.arange(len(codes)), np.zeros(total - len(codes), np.int64)]).astype(np.int32)
        images = random.integers(0, 256, (total, 84, 84, 3), dtype=np.uint8)
        made[split] = (codes, random.permutation(labels), images)
    return made


def words(code: str) -> str:
    return f"creature {code[1:]}, beast"


def write_labels(folder: Path, data: Data, called: Callable[[str], str], keys: type = str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, (codes, labels, _) in data.items():
        content: dict[object, object] = {
            "label_specific": labels,
            "label_general": np.full(len(labels), 99),
            "label_specific_str": [called(code) for code in codes],
            "label_general_str": ["thing"],
        }
        if keys is bytes:
            content = {str(key).encode(): value for key, value in content.items()}
            content[b"label_specific_str"] = [called(code).encode() for code in codes]
        (folder / f"{split}_labels.pkl").write_bytes(pickle.dumps(content, 2))


def write_pickles(folder: Path, data: Data, called: Callable[[str], str] = words, keys: type = str) -> Path:
    write_labels(folder, data, called, keys)
    for split, (_, _, images) in data.items():
        encoded = []
        for image in images:
            file = io.BytesIO()
            Image.fromarray(image).save(file, "PNG")
            encoded.append(np.frombuffer(file.getvalue(), np.uint8)[:, None])
        (folder / f"{split}_images_png.pkl").write_bytes(pickle.dumps(encoded, 2))
    return folder


def write_npz(folder: Path, data: Data, called: Callable[[str], str] = words) -> Path:
    """As OpenCV reads pictures: blue, green, red."""
    write_labels(folder, data, called)
    for split, (_, _, images) in data.items():
        np.savez(folder / f"{split}_images.npz", images=images[..., ::-1])
    return folder


def write_folders(folder: Path, data: Data) -> Path:
    for split, (codes, labels, images) in data.items():
        for place, (label, image) in enumerate(zip(labels, images, strict=True)):
            file = folder / split / codes[label] / f"{place:03}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(file)
    return folder


def write_lists(folder: Path, benchmark: Benchmark) -> None:
    codes = list(benchmark.split_of())
    (folder / "synsets.txt").write_text("\n".join(codes))
    (folder / "class_names.txt").write_text("\n".join(map(words, codes)))


def assert_holds(store: Store, data: Data, called: Callable[[str], str] = str) -> None:
    at = {entry.name: entry for entry in store.entries}
    for split, (codes, labels, images) in data.items():
        for label, code in enumerate(codes):
            entry = at[called(code)]
            assert entry.split == split
            np.testing.assert_array_equal(
                store.images[entry.start : entry.start + entry.count].transpose(0, 2, 3, 1),
                images[labels == label],
            )
    assert len(at) == 9


@pytest.mark.parametrize("write", [write_pickles, write_npz, write_folders])
def test_every_layout_makes_the_same_store(
    write: Callable[..., Path], tmp_path: Path, benchmark: Benchmark, data: Data
) -> None:
    source = write(tmp_path / "in", data)
    write_lists(source, benchmark)
    store = prepare("tiered-imagenet", source, tmp_path / "stores")
    assert_holds(store, data)
    assert all(entry.superclass == benchmark.classes[entry.split][entry.name] for entry in store.entries)


@pytest.mark.parametrize("write", [write_pickles, write_npz])
def test_classes_that_are_only_words(write: Callable[..., Path], tmp_path: Path, data: Data) -> None:
    store = prepare("tiered-imagenet", write(tmp_path / "in", data), tmp_path / "stores")
    assert_holds(store, data, words)
    assert {entry.superclass for entry in store.entries} == {""}


def test_codes_as_names_and_keys_of_python_2(tmp_path: Path, data: Data) -> None:
    source = write_pickles(tmp_path / "in", data, str, bytes)
    assert_holds(prepare("tiered-imagenet", source, tmp_path / "stores"), data)


def test_two_classes_of_one_name(tmp_path: Path, data: Data) -> None:
    cranes = (data["train"][0][0], data["test"][0][0])
    source = write_npz(tmp_path / "in", data, lambda code: "crane" if code in cranes else words(code))
    store = prepare("tiered-imagenet", source, tmp_path / "stores")
    assert {entry.name for entry in store.entries} >= {"crane", "crane (test)"}


def refused(source: Path, root: Path, said: str) -> None:
    with pytest.raises(DataError, match=said):
        prepare("tiered-imagenet", source, root)
    assert not root.exists() or not list(root.iterdir())


def test_errors_in_the_labels(tmp_path: Path, data: Data) -> None:
    root, source = tmp_path / "stores", write_pickles(tmp_path / "in", data)
    file = source / "val_labels.pkl"
    whole = pickle.loads(file.read_bytes())

    def broken(said: str, **more: object) -> None:
        file.write_bytes(pickle.dumps(whole | more))
        refused(source, root, said)

    labels = whole["label_specific"]
    broken(r"val_labels\.pkl has images of 1 classes, and tiered-imagenet has 2", label_specific=labels * 0)
    broken(
        r"val_labels\.pkl has labels for 4 images, and tiered-imagenet has 5",
        label_specific=labels[labels.argsort()[1:]],
    )
    broken(r"val_labels\.pkl has labels 0 to 7, and 2 class names", label_specific=labels * 7)
    broken(r"val_labels\.pkl: label_specific must be a list of whole", label_specific=labels / 2)
    broken(r"val_labels\.pkl lacks '", label_specific_str=[data["val"][0][0], "n99999999"])
    file.write_bytes(file.read_bytes()[:-10])
    refused(source, root, r"val_labels\.pkl cannot be read as a pickle")
    file.unlink()
    refused(source, root, r"val_labels\.pkl is missing")
    for other in ("train", "test"):
        (source / f"{other}_labels.pkl").unlink()
    refused(source, root, r"train_labels\.pkl is missing")


def test_errors_in_the_images(tmp_path: Path, data: Data) -> None:
    root, source = tmp_path / "stores", write_pickles(tmp_path / "pickles", data)
    file = source / "test_images_png.pkl"
    encoded = pickle.loads(file.read_bytes())
    file.write_bytes(pickle.dumps([*encoded[:5], encoded[5][:200], *encoded[6:]]))
    refused(source, root, r"Image 5 of .*test_images_png\.pkl cannot be read as an image")
    file.write_bytes(pickle.dumps(encoded[:-1]))
    refused(source, root, r"test_images_png\.pkl holds 8 images, and its labels are for 9")
    file.unlink()
    refused(source, root, r"test_images_png\.pkl is missing")
    source = write_npz(tmp_path / "npz", data)
    file = source / "test_images.npz"
    np.savez(file, images=data["test"][2][..., 0])
    refused(source, root, r"test_images\.npz holds uint8 \[9, 84, 84\].*colour images")
    np.savez(file, pictures=data["test"][2])
    refused(source, root, r"test_images\.npz has pictures; expected is the array 'images'")
    np.savez(file, images=np.array([{}], object))
    refused(source, root, r"test_images\.npz cannot be read")
    file.write_bytes(b"PK")
    refused(source, root, r"test_images\.npz cannot be read")
    source = write_folders(tmp_path / "folders", data)
    next((source / "val").rglob("*.png")).unlink()
    refused(source, root, "(lacks|holds 4 images in the val split, and tiered-imagenet has 5)")
