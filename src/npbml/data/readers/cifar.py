"""CIFAR-100 as Krizhevsky publishes it, of which CIFAR-FS and FC100 are splits."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from npbml.data.archives import Files, Member
from npbml.data.benchmarks import Benchmark
from npbml.data.reading import (
    Reading,
    check_counts,
    check_names,
    entries,
    numbers,
    resized,
    table,
    texts,
    unpickled,
)
from npbml.errors import DataError

_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE


def read_python(files: Files, benchmark: Benchmark, size: int) -> Reading | None:
    """`cifar-100-python/`: the pickles train, test and meta."""
    if not (found := files.together("meta", "train", "test")):
        return None
    meta, *parts = found
    (names,) = table(meta, unpickled(meta), "fine_label_names")
    labels, pixels = [], []
    for part in parts:
        fine, data = table(part, unpickled(part), "fine_labels", "data")
        if not isinstance(data, np.ndarray):
            raise DataError(f"{part} holds {type(data).__name__} as data; expected is an array of images.")
        labels.append(numbers(part, fine, "fine_labels"))
        pixels.append(np.asarray(data))
        if pixels[-1].dtype != np.uint8 or pixels[-1].shape != (len(labels[-1]), _PIXELS):
            raise DataError(
                f"{part} holds {pixels[-1].dtype} {list(pixels[-1].shape)} with {len(labels[-1])} labels; "
                f"expected is uint8 [images, {_PIXELS}] with a label each, colour images of {_SIDE}x{_SIDE}."
            )
    return _reading(
        "python pickles", found, benchmark, size, texts(meta, names, "fine_label_names"), labels, pixels
    )


def read_binary(files: Files, benchmark: Benchmark, size: int) -> Reading | None:
    """`cifar-100-binary/`: records of coarse label, fine label and pixels in train.bin and test.bin."""
    if not (found := files.together("fine_label_names.txt", "train.bin", "test.bin")):
        return None
    listed, *parts = found
    names = listed.text().split()
    labels, pixels = [], []
    for part in parts:
        if part.size % (_PIXELS + 2):
            raise DataError(
                f"{part} has {part.size} bytes, which is no multiple of the {_PIXELS + 2} of one image. "
                "It is cut short: get it again."
            )
        records = _bytes(part).reshape(-1, _PIXELS + 2)
        labels.append(records[:, 1].astype(np.int64))
        pixels.append(records[:, 2:])
    return _reading("binary version", found, benchmark, size, names, labels, pixels)


def _bytes(member: Member) -> np.ndarray:
    """Memory-mapped where it is a file of its own."""
    if isinstance(member.holder, Path):
        return np.memmap(member.holder / member.path, np.uint8, "r") if member.size else np.empty(0, np.uint8)
    return np.frombuffer(member.read(), np.uint8)


def _reading(
    layout: str,
    found: Sequence[Member],
    benchmark: Benchmark,
    size: int,
    names: Sequence[str],
    labels: Sequence[np.ndarray],
    pixels: Sequence[np.ndarray],
) -> Reading:
    where = " and ".join(map(str, found[1:]))
    check_names(found[0], benchmark.name, benchmark.split_of(), names)
    for part, fine in zip(found[1:], labels, strict=True):
        if len(fine) and not 0 <= fine.min() <= fine.max() < len(names):
            raise DataError(
                f"{part} has labels {fine.min()} to {fine.max()}, and {found[0]} names {len(names)} classes."
            )
    tally = np.bincount(np.concatenate(labels), minlength=len(names)).tolist()
    counts = dict(zip(names, tally, strict=True))
    check_counts(where, benchmark, counts)
    made = entries(benchmark, counts)
    number = {name: label for label, name in enumerate(names)}

    def images() -> Iterator[np.ndarray]:
        for entry in made:
            rows = [data[fine == number[entry.name]] for fine, data in zip(labels, pixels, strict=True)]
            planes = np.concatenate(rows).reshape(-1, 3, _SIDE, _SIDE)
            yield planes if size == _SIDE else resized(planes.transpose(0, 2, 3, 1), size)

    return Reading(layout, found, made, images())
