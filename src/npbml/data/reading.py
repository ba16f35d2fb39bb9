"""What a reader of a benchmark hands over, and what the readers share."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from npbml.data.archives import Files, Member
from npbml.data.benchmarks import Benchmark
from npbml.data.folder import read_pictures_by_class
from npbml.data.pickles import load_pickle
from npbml.data.store import SPLITS, ClassEntry, Split
from npbml.errors import DataError
from npbml.pictures import SUFFIXES, Encoded, picture_bytes

# The scripts that first made these benchmarks resize so.
RESAMPLE = Image.Resampling.LANCZOS


@dataclasses.dataclass(frozen=True)
class Reading:
    """A benchmark that was found in a download."""

    layout: str
    files: Sequence[Member]
    """Those that are read."""
    entries: Sequence[ClassEntry]
    images: Iterator[np.ndarray]
    """uint8 [images, channels, size, size], those of one entry after another."""


Reader = Callable[[Files, Benchmark, int], Reading | None]
"""Looks for its layout among the files; None says that it is not there."""


def entries(benchmark: Benchmark, counts: Mapping[str, int]) -> list[ClassEntry]:
    """The classes in the order of the published list, with their number of images."""
    made: list[ClassEntry] = []
    start = 0
    for split in SPLITS:
        for name, superclass in benchmark.classes[split].items():
            made.append(ClassEntry(name, split, start, counts[name], superclass))
            start += counts[name]
    return made


def check_counts(where: object, benchmark: Benchmark, counts: Mapping[str, int]) -> None:
    """Raise a DataError unless every class is there with the images that are published."""
    known = benchmark.split_of()
    check_names(where, benchmark.name, known, [name for name, count in counts.items() if count])
    if benchmark.images is not None:
        for name in known:
            if counts[name] != benchmark.images:
                raise DataError(
                    f"{where} holds {counts[name]} images of class {name!r}, and {benchmark.name} has "
                    f"{benchmark.images} of every class. Get the data set again."
                )
    for split, total in (benchmark.totals or {}).items():
        found = sum(counts[name] for name in benchmark.classes[split])
        if found != total:
            raise DataError(
                f"{where} holds {found} images in the {split} split, and {benchmark.name} has {total}. "
                "Get the data set again."
            )


def check_names(where: object, name: str, expected: Mapping[str, Any], found: Sequence[str]) -> None:
    """Raise a DataError unless every expected class was found."""
    if missing := [label for label in expected if label not in set(found)]:
        raise DataError(
            f"{where} lacks {_some(missing)} of the {len(expected)} classes of {name} that are expected "
            f"there. It holds {_some(list(found)) if found else 'no class'}. Is it another data set, or a part?"
        )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def one_of_each(files: Files, *patterns: str) -> dict[Split, Member] | None:
    """The file of every split, whose patterns have {} for the name of the split; None if there is none at all."""
    found: dict[Split, Member] = {}
    for split in SPLITS:
        if members := files.named(*(pattern.format(split) for pattern in patterns)):
            found[split] = members[0]
    if found and (missing := [patterns[0].format(split) for split in SPLITS if split not in found]):
        raise DataError(
            f"{next(iter(found.values()))} is there, and {' and '.join(missing)} is missing from {files.source}. "
            "All three splits are needed."
        )
    return found or None


def is_picture(member: Member) -> bool:
    return member.path.lower().endswith(SUFFIXES) and not member.name.startswith(".")


def read_pictures(
    classes: Mapping[str, Sequence[Encoded]], made: Sequence[ClassEntry], size: int, channels: int
) -> Iterator[np.ndarray]:
    return read_pictures_by_class([classes[entry.name] for entry in made], size, channels, resample=RESAMPLE)


def resized(images: np.ndarray, size: int) -> np.ndarray:
    """uint8 [images, height, width, 3] to [images, 3, size, size]."""
    if images.shape[1:3] != (size, size):
        return np.stack([picture_bytes(image, size, 3, RESAMPLE) for image in images])
    return images.transpose(0, 3, 1, 2)


def text(value: str | bytes) -> str:
    """A string of Python 2 or 3."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def texts(member: Member, values: Any, name: str) -> list[str]:
    """The strings of a pickled list."""
    values = _listed(values)
    if values is None or not all(isinstance(value, str | bytes) for value in values):
        raise DataError(f"{member}: {name} must be a list of names. Get the file again.")
    return [text(value) for value in values]


def numbers(member: Member, values: Any, name: str) -> np.ndarray:
    """The whole numbers of a pickled list or array, int64 [numbers]."""
    values = _listed(values)
    # Nothing is made into an array that is not flat: of nested lists numpy would look at every one.
    good = values is not None and all(type(value) is int or isinstance(value, np.integer) for value in values)
    if not good or not all(-(1 << 63) <= value < 1 << 63 for value in values):
        raise DataError(f"{member}: {name} must be a list of whole numbers. Get the file again.")
    return np.array(values, np.int64)


def _listed(values: Any) -> Any:
    """The values of a list, a tuple or an array of one dimension; None if it is none of them."""
    if isinstance(values, np.ndarray):
        return values.tolist() if values.ndim == 1 else None
    return values if isinstance(values, list | tuple) else None


def unpickled(member: Member) -> Any:
    with member.open() as file:
        return load_pickle(file, str(member))


def table(member: Member, content: Any, *keys: str) -> list[Any]:
    """The values of `keys` in a pickled dictionary whose keys may be bytes."""
    if not isinstance(content, dict):
        raise DataError(f"{member} holds {type(content).__name__}, where a dictionary was expected.")
    by_text = {text(key): value for key, value in content.items() if isinstance(key, str | bytes)}
    if missing := [key for key in keys if key not in by_text]:
        raise DataError(
            f"{member} has the keys {', '.join(sorted(by_text)) or 'none'}; expected is {', '.join(missing)}. "
            "Is it another data set?"
        )
    return [by_text[key] for key in keys]


def colour_images(member: Member, array: Any, name: str) -> np.ndarray:
    """The array if it is uint8 [images, height, width, 3]."""
    if not isinstance(array, np.ndarray):
        raise DataError(f"{member} holds {type(array).__name__} as {name}; expected is an array of images.")
    pixels = np.asarray(array)
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[3] != 3 or not pixels.size:
        raise DataError(
            f"{member} holds {pixels.dtype} {list(pixels.shape)} as {name}; expected are colour images, "
            "uint8 [images, height, width, 3]."
        )
    return pixels
