import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from npbml.data.benchmarks import Benchmark
from npbml.data.check import check
from npbml.data.store import ClassEntry, Store

CLASSES = [
    ClassEntry("cat", "train", 0, 4, "animal"),
    ClassEntry("dog", "train", 4, 4, "animal"),
    ClassEntry("cup", "val", 8, 3),
    ClassEntry("car", "test", 11, 3),
]


def write(folder: Path, images: np.ndarray, name: str = "own", classes: list[ClassEntry] = CLASSES) -> Store:
    return Store.write(folder, name=name, images=images, classes=classes, provenance={})


def noise(count: int = 14, size: int = 12) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, 3, size, size), dtype=np.uint8)


def test_a_store_in_order(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    store = write(tmp_path / "a", noise())
    report = check(store, lambda *done: told.append(done))
    assert report.ok
    assert not report.copies
    assert told[-1] == (4, 4)
    text = "\n".join(report.lines)
    assert "train: 2 classes, 8 images, 4 of each class, 1 superclasses" in text
    assert "val: 1 classes, 3 images, 3 of each class" in text
    mean = noise()[:8].mean((0, 2, 3)) / 255
    assert f"train images: mean {mean[0]:.4f} {mean[1]:.4f} {mean[2]:.4f}" in text


def test_copies_are_counted_by_where_they_are(tmp_path: Path) -> None:
    images = noise()
    images[1] = images[0]  # cat, cat
    images[5] = images[2]  # cat, dog
    images[9] = images[3]  # cat, cup
    images[12] = images[6]  # dog, car
    report = check(write(tmp_path / "a", images))
    assert report.ok
    assert {str(one) for one in report.copies} == {
        "cat (train) = cat (train)",
        "cat (train) = dog (train)",
        "cat (train) = cup (val)",
        "dog (train) = car (test)",
    }
    text = "\n".join(report.lines)
    assert "the same image in two splits: 2 exactly, 0 nearly (1 train and test, 1 train and val), such as" in text
    assert "two classes of a split: 1 exactly, 0 nearly (1 train), such as cat (train) = dog (train)" in text
    assert "the same image twice in a class: 1 exactly, 0 nearly" in text


def test_damage_is_found(tmp_path: Path) -> None:
    store = write(tmp_path / "a", noise())
    content = bytearray((tmp_path / "a" / "images.npy").read_bytes())
    content[-1] ^= 1
    (tmp_path / "a" / "images.npy").write_bytes(content)
    report = check(Store.open(store.folder))
    assert not report.ok
    assert any(line.startswith("checksum: WRONG") and "images.npy is damaged" in line for line in report.lines)


@pytest.fixture
def benchmark(small: Callable[..., Benchmark]) -> Benchmark:
    return small("mini-imagenet", 3, 2, 1, 1)


def published(benchmark: Benchmark) -> list[ClassEntry]:
    return [ClassEntry(name, split, 3 * n, 3) for n, (name, split) in enumerate(benchmark.split_of().items())]


def test_a_benchmark_as_published(tmp_path: Path, benchmark: Benchmark) -> None:
    store = write(tmp_path / "a", noise(12, 84), "mini-imagenet", published(benchmark))
    report = check(store)
    assert report.ok
    assert sum("as published" in line for line in report.lines) == 3


def test_a_benchmark_of_other_counts_or_splits(tmp_path: Path, benchmark: Benchmark) -> None:
    entries = published(benchmark)
    fewer = check(write(tmp_path / "a", noise(9), "mini-imagenet", entries[:3]))
    assert not fewer.ok
    assert any("test: WRONG, 0 classes, 0 images; published are 1 classes with 3" in line for line in fewer.lines)
    uneven = [*entries[:2], ClassEntry(entries[2].name, "val", 6, 4), ClassEntry(entries[3].name, "test", 10, 2)]
    assert not check(write(tmp_path / "b", noise(12), "mini-imagenet", uneven)).ok
    moved = [
        ClassEntry(e.name, s, e.start, 3) for e, s in zip(entries, ("train", "val", "train", "test"), strict=True)
    ]
    report = check(write(tmp_path / "c", noise(12), "mini-imagenet", moved))
    assert not report.ok
    assert any(f"'{entries[1].name}' is in val; published is train" in line for line in report.lines)


def test_a_class_in_two_splits(tmp_path: Path) -> None:
    store = write(tmp_path / "a", noise())
    data = json.loads((store.folder / "store.json").read_text())
    assert check(store).ok
    data["classes"][3]["name"] = "cat"
    entries = tuple(ClassEntry(**entry) for entry in data["classes"])
    report = check(replace(store, entries=entries))
    assert any("1 classes are in two splits, such as 'cat'" in line for line in report.lines)
    assert not report.ok
