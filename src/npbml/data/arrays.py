"""Data sets of a user's own that are made in Python.

    @npbml.register_dataset("blobs")
    def blobs():
        return {"train": {"red": pictures, ...}, "val": {...}, "test": {...}}

The pictures of a class are whatever npbml reads as pictures: an array of bytes or of floats in 0 to 1, PIL images,
paths.
"""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from npbml.data.image_data import ImageData
from npbml.data.request import Request
from npbml.data.store import SPLITS, ClassEntry, Store, moments
from npbml.errors import DataError
from npbml.parts import DATASETS
from npbml.pictures import picture_bytes, picture_list, read_picture

Splits = Mapping[str, Mapping[str, Any]]  # split -> class -> pictures


def register_dataset(name: str, summary: str = "", mirrors: bool = True) -> Callable[[Any], Any]:
    """A decorator that registers a function without arguments as the data set `name`.

    The function returns, for each of train, val and test, a dictionary of class names and their pictures.

    Args:
        name: By which settings and commands know it.
        summary: A line for lists; the function's docstring if not given.
        mirrors: Whether a mirrored image is still one of its class.
    """

    def add(make: Callable[[], Splits]) -> Callable[[], Splits]:
        def open_it(request: Request) -> ImageData:
            return ImageData(store_of(name, make(), request.size), request)

        about = summary or (make.__doc__ or "").strip().partition("\n")[0]
        DATASETS.register(name, open_it, about, mirrors=mirrors)
        return make

    return add


def store_of(name: str, splits: Splits, size: int | None = None) -> Store:
    """A store, in memory, of pictures given as Python objects."""
    missing = [split for split in SPLITS if not splits.get(split)]
    if missing:
        raise DataError(f"The data set {name} has no classes in {' and '.join(missing)}: give some to each split.")
    given = {
        (split, label): _pictures(name, label, splits[split][label]) for split in SPLITS for label in splits[split]
    }
    first = _as_it_is(next(iter(given.values()))[0])
    side, channels = size or first.shape[-1], first.shape[0]
    entries: list[ClassEntry] = []
    images: list[np.ndarray] = []
    for (split, label), pictures in given.items():
        entries.append(ClassEntry(str(label), split, len(images), len(pictures)))
        images += [picture_bytes(picture, side, channels) for picture in pictures]
    pixels = np.stack(images)
    trained = [entry for entry in entries if entry.split == "train"]
    mean, std = moments(pixels, trained)
    checksum = hashlib.sha256(np.ascontiguousarray(pixels).data).hexdigest()
    return Store(Path(name), name, pixels, tuple(entries), tuple(mean), tuple(std), checksum, {"dataset": name})


def _pictures(name: str, label: str, pictures: Any) -> list[Any]:
    """The single pictures of a class."""
    try:
        return picture_list(pictures)
    except DataError as error:
        raise DataError(f"The class {label!r} of {name}: {error}") from None


def _as_it_is(picture: Any) -> np.ndarray:
    """A picture as it is, uint8 [channels, side, side], where the side is its shorter one."""
    image = read_picture(picture)
    return picture_bytes(image, min(image.size), 1 if image.mode == "L" else 3)
