import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from npbml.data.benchmarks import PUBLISHED, Benchmark
from npbml.data.prepare import prepare
from npbml.data.store import Store
from npbml.errors import DataError

Small = Callable[..., Benchmark]
NAMES = sorted(PUBLISHED["cifar-fs"].split_of())


@pytest.fixture(autouse=True)
def three_images(small: Small) -> None:
    small("cifar-fs", 3, 64, 16, 20)
    small("fc100", 3, 60, 20, 20)


def data(seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Labels and pixels of train, with two images of each class, and of test, with one."""
    random = np.random.default_rng(seed)
    labels = [random.permutation(np.repeat(np.arange(100), count)) for count in (2, 1)]
    return labels, [random.integers(0, 256, (len(fine), 3072), dtype=np.uint8) for fine in labels]


def write_python(folder: Path, labels: list[np.ndarray], pixels: list[np.ndarray], protocol: int = 2) -> Path:
    folder.mkdir(parents=True)
    for name, fine, rows in zip(("train", "test"), labels, pixels, strict=True):
        batch = {b"fine_labels": fine.tolist(), b"coarse_labels": [0] * len(fine), b"data": rows}
        (folder / name).write_bytes(pickle.dumps(batch, protocol))
    (folder / "meta").write_bytes(pickle.dumps({b"fine_label_names": [name.encode() for name in NAMES]}, protocol))
    return folder


def write_binary(folder: Path, labels: list[np.ndarray], pixels: list[np.ndarray]) -> Path:
    folder.mkdir(parents=True)
    for name, fine, rows in zip(("train", "test"), labels, pixels, strict=True):
        head = np.stack([np.zeros_like(fine), fine], 1).astype(np.uint8)
        (folder / f"{name}.bin").write_bytes(np.concatenate([head, rows], 1).tobytes())
    (folder / "fine_label_names.txt").write_text("\n".join(NAMES) + "\n")
    (folder / "coarse_label_names.txt").write_text("people\n")
    return folder


def packed(folder: Path) -> Path:
    archive = folder.parent / f"{folder.name}.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, folder.name)
    return archive


def assert_holds(store: Store, labels: list[np.ndarray], pixels: list[np.ndarray]) -> None:
    split_of = PUBLISHED[store.name].split_of()
    for entry in store.entries:
        own = np.concatenate(
            [rows[fine == NAMES.index(entry.name)] for fine, rows in zip(labels, pixels, strict=True)]
        )
        np.testing.assert_array_equal(
            store.images[entry.start : entry.start + entry.count], own.reshape(3, 3, 32, 32)
        )
        assert (entry.split, entry.count) == (split_of[entry.name], 3)
        assert entry.superclass
    assert (store.mean[0], store.std[2]) == (0.5071, 0.2761)


@pytest.mark.parametrize("name", ["cifar-fs", "fc100"])
@pytest.mark.parametrize("layout", ["python", "python packed", "binary", "binary packed", "python above"])
def test_every_layout_makes_the_same_store(name: str, layout: str, tmp_path: Path) -> None:
    labels, pixels = data()
    write = write_python if "python" in layout else write_binary
    source = write(tmp_path / "in" / f"cifar-100-{layout.split()[0]}", labels, pixels)
    if "packed" in layout:
        source = packed(source)
    elif "above" in layout:
        source = tmp_path
    store = prepare(name, source, tmp_path / "stores")
    assert_holds(store, labels, pixels)
    expected = prepare(name, write_python(tmp_path / "plain", labels, pixels, 4), tmp_path / "others")
    assert store.checksum == expected.checksum
    assert str(tmp_path) not in (store.folder / "store.json").read_text()
    assert not list((tmp_path / "stores").glob("*making*"))


def test_an_archive_in_a_folder_is_found(tmp_path: Path) -> None:
    archive = packed(write_python(tmp_path / "cifar-100-python", *data()))
    (tmp_path / "downloads").mkdir()
    archive.rename(tmp_path / "downloads" / archive.name)
    assert_holds(prepare("fc100", tmp_path / "downloads", tmp_path / "stores"), *data())


def test_another_size(tmp_path: Path) -> None:
    labels, pixels = data()
    store = prepare("cifar-fs", write_binary(tmp_path / "in", labels, pixels), tmp_path / "stores", size=16)
    entry = store.entries[0]
    row = pixels[0][labels[0] == NAMES.index(entry.name)][0].reshape(3, 32, 32).transpose(1, 2, 0)
    expected = np.asarray(Image.fromarray(row).resize((16, 16), Image.Resampling.LANCZOS))
    np.testing.assert_array_equal(store.images[entry.start].transpose(1, 2, 0), expected)


def refused(source: Path, root: Path, said: str) -> None:
    with pytest.raises(DataError, match=said):
        prepare("cifar-fs", source, root)
    assert not root.exists() or not list(root.iterdir())


def test_a_class_with_too_few_images(tmp_path: Path) -> None:
    labels, pixels = data()
    labels[1][labels[1] == NAMES.index("apple")] = NAMES.index("bear")
    for write in (write_python, write_binary):
        source = write(tmp_path / write.__name__, labels, pixels)
        refused(source, tmp_path / "stores", r"train.* and .*test.* holds 2 images of class 'apple', .* has 3")


def test_a_missing_class(tmp_path: Path) -> None:
    labels, pixels = data()
    keep = [fine != NAMES.index("wolf") for fine in labels]
    labels, pixels = ([part[chosen] for part, chosen in zip(both, keep, strict=True)] for both in (labels, pixels))
    refused(write_python(tmp_path / "a", labels, pixels), tmp_path / "stores", r"a/train .*lacks 'wolf'")
    source = write_python(tmp_path / "b", *data())
    names = [name.replace("wolf", "werewolf").encode() for name in NAMES]
    (source / "meta").write_bytes(pickle.dumps({b"fine_label_names": names}))
    refused(source, tmp_path / "stores", r"b/meta lacks 'wolf'")


def test_truncated_files(tmp_path: Path) -> None:
    source = write_python(tmp_path / "python", *data())
    (source / "train").write_bytes((source / "train").read_bytes()[:-2000])
    refused(source, tmp_path / "stores", r"python/train cannot be read as a pickle")
    source = write_binary(tmp_path / "binary", *data())
    (source / "test.bin").write_bytes((source / "test.bin").read_bytes()[:-2000])
    refused(source, tmp_path / "stores", r"binary/test\.bin has .* bytes.*cut short")
    archive = packed(write_python(tmp_path / "cifar-100-python", *data()))
    archive.write_bytes(archive.read_bytes()[:-200_000])
    refused(archive, tmp_path / "stores", r"cifar-100-python\.tar\.gz cannot be unpacked")


@pytest.mark.parametrize("suffix", ["", ".bin"])
def test_cifar_10_is_called_by_its_name(tmp_path: Path, suffix: str) -> None:
    source = tmp_path / "cifar-10-batches-py"
    source.mkdir()
    for name in ("data_batch_1", "data_batch_2", "test_batch"):
        (source / f"{name}{suffix}").write_bytes(b"")
    refused(source, tmp_path / "stores", r"looks like CIFAR-10, and no layout of cifar-fs.*cifar-100-python")
    refused(packed(source), tmp_path / "stores", r"tar\.gz looks like CIFAR-10")


def test_pickles_of_something_else(tmp_path: Path) -> None:
    labels, pixels = data()
    source = write_python(tmp_path / "a", labels, [rows[:, :1024] for rows in pixels])
    refused(source, tmp_path / "stores", r"a/train holds uint8 \[200, 1024\].*expected is uint8 \[images, 3072\]")
    (source / "train").write_bytes(pickle.dumps({b"labels": [1], b"data": []}))
    refused(source, tmp_path / "stores", r"a/train has the keys data, labels; expected is fine_labels")
    (source / "train").write_bytes(pickle.dumps([1]))
    refused(source, tmp_path / "stores", r"a/train holds list, where a dictionary")
    labels[0][0] = 100
    refused(write_python(tmp_path / "b", labels, pixels), tmp_path / "stores", r"b/train has labels 0 to 100")


def test_a_hostile_pickle_is_refused(tmp_path: Path) -> None:
    source = write_python(tmp_path / "a", *data())
    (source / "test").write_bytes(b"cos\nsystem\n(S'touch %s'\ntR." % str(tmp_path / "mark").encode())
    refused(source, tmp_path / "stores", r"a/test is refused: it asks for os\.system")
    assert not (tmp_path / "mark").exists()
