"""A data set on disk: a folder with `images.npy` and `store.json`, opened in milliseconds."""

import contextlib
import dataclasses
import glob
import hashlib
import json
import math
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from npbml.data.tasks import ClassSet
from npbml.errors import DataError, RunError
from npbml.json_files import parse_json, sealed, sync_folder, unsealed

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)

FORMAT = 1
HALF_MADE = ".making-"
_CHUNK = 1 << 24


def data_root() -> Path:
    """Where stores live: the folder that NPBML_DATA names, or `npbml` in the user's cache folder."""
    if named := os.environ.get("NPBML_DATA"):
        return Path(named).expanduser()
    return cache_folder()


def cache_folder() -> Path:
    """`npbml` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "npbml"


@dataclasses.dataclass(frozen=True)
class ClassEntry:
    """One class: images `start` to `start + count` of the store."""

    name: str
    split: Split
    start: int
    count: int
    superclass: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Store:
    """A data set whose images stay on disk, memory-mapped, until they are used.

    `images` is uint8 [images, channels, height, width], those of a class next to one another; `mean` and
    `std` are per channel, of pixels in 0..1; `provenance` says what the store was made from.
    """

    folder: Path
    name: str
    images: np.ndarray
    entries: tuple[ClassEntry, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    checksum: str
    provenance: Mapping[str, Any]
    digests: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """SHA-256 of the images of each split; stores of earlier versions have none."""

    @property
    def channels(self) -> int:
        return self.images.shape[1]

    @property
    def size(self) -> int:
        """Height and width of an image."""
        return self.images.shape[2]

    @classmethod
    def open(cls, folder: str | Path) -> "Store":
        """The store in `folder`, checked for what can be checked without reading the images."""
        folder = Path(folder)
        index, pixels = folder / "store.json", folder / "images.npy"
        for file in (index, pixels):
            if not file.is_file():
                raise DataError(f"{file} is missing: {folder} is not a complete data store. Make it again.")
        try:
            data = unsealed(parse_json(index.read_text("utf-8")), index)
            if data["format"] != FORMAT:
                raise DataError(
                    f"{index} is of format {data['format']!r}, and this version reads format {FORMAT}. "
                    "Make the store again."
                )
            entries = tuple(ClassEntry(**entry) for entry in data["classes"])
            shape = (data["images"], data["channels"], data["size"], data["size"])
            store = cls(
                folder=folder,
                name=data["name"],
                images=_map(pixels),
                entries=entries,
                mean=tuple(map(float, data["mean"])),
                std=tuple(map(float, data["std"])),
                checksum=data["checksum"],
                provenance=data["provenance"],
                digests=dict(data.get("digests", {})),
            )
            if store.images.dtype != np.uint8 or store.images.shape != shape:
                raise DataError(
                    f"{pixels} holds {store.images.dtype} {list(store.images.shape)}, and {index.name} "
                    f"promises uint8 {list(shape)}. The store is damaged: make it again."
                )
            _check_classes(index, store.entries, shape)
            _check_moments(index, store.mean, store.std, store.channels)
        except RunError as error:
            raise DataError(
                f"{index} is damaged: its digest is not that of its content. Make the store again."
            ) from error
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, OSError) as error:
            raise DataError(f"{index} is damaged ({error!r}). Make the store again.") from error
        return store

    @classmethod
    def write(
        cls,
        folder: str | Path,
        *,
        name: str,
        images: np.ndarray | Iterable[np.ndarray],
        shape: Sequence[int] | None = None,
        classes: Sequence[ClassEntry],
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        provenance: Mapping[str, Any],
    ) -> "Store":
        """Make the store and open it; it appears in `folder` whole or not at all.

        `images` is one uint8 array, or pieces of it in order, with the `shape` of them all, for data that
        would not fit into memory. `mean` and `std` are those of the train split (of all classes where
        there is none) if not given. A store that was in `folder` before is replaced.
        """
        folder = Path(folder)
        if isinstance(images, np.ndarray):
            shape, images = images.shape, (images,)
        if shape is None:
            raise ValueError("shape is needed when images come in pieces")
        _check_classes(folder, classes, shape)
        making = folder.with_name(f"{folder.name}{HALF_MADE}{uuid.uuid4().hex}")
        try:
            making.mkdir(parents=True)
            checksum = _write_images(making / "images.npy", images, tuple(shape))
            if mean is None or std is None:
                trained = [entry for entry in classes if entry.split == "train"]
                mean, std = moments(_map(making / "images.npy"), trained or classes)
            _check_moments(folder, mean, std, shape[1])
            made = _map(making / "images.npy")
            data = {
                "format": FORMAT,
                "name": name,
                "images": shape[0],
                "channels": shape[1],
                "size": shape[2],
                "mean": list(mean),
                "std": list(std),
                "checksum": checksum,
                "digests": {split: _digest(_spans(made, classes, split)) for split in SPLITS},
                "provenance": dict(provenance),
                "classes": [dataclasses.asdict(entry) for entry in classes],
            }
            with open(making / "store.json", "w", encoding="utf-8") as file:
                json.dump(sealed(data), file, indent=1)
                _sync(file)
            _replace(making, folder)
        except OSError as error:
            raise DataError(
                f"{folder} could not be written ({error}). Make room there, or name another folder in "
                "the variable NPBML_DATA."
            ) from error
        finally:
            shutil.rmtree(making, ignore_errors=True)
            _sweep(folder)
        return cls.open(folder)

    def verify(self) -> None:
        """Read every image and compare with the checksum; raise a DataError when the file has changed."""
        digest = hashlib.sha256()
        with open(self.folder / "images.npy", "rb") as file:
            # Read, not mapped: pages that were looked at once would count as memory in use.
            np.lib.format.read_magic(file)
            np.lib.format.read_array_header_1_0(file)
            while piece := file.read(_CHUNK):
                digest.update(piece)
        if digest.hexdigest() != self.checksum:
            raise DataError(
                f"{self.folder / 'images.npy'} is damaged: its checksum is {digest.hexdigest()[:12]}..., and "
                f"store.json says {self.checksum[:12]}.... Delete {self.folder} and make the store again."
            )

    def measured(self) -> tuple[list[float], list[float]]:
        """Mean and standard deviation per channel of the train images (of all where there are none)."""
        trained = [entry for entry in self.entries if entry.split == "train"]
        return moments(self.images, trained or self.entries)

    def classes(self, split: Split) -> ClassSet:
        """The classes of `split` with their images in memory, compared with their digest where there is one."""
        if split not in SPLITS:
            raise DataError(f"{self.name} has no split {split!r}; it has {', '.join(SPLITS)}.")
        entries = [entry for entry in self.entries if entry.split == split]
        if not entries:
            raise DataError(f"{self.name} in {self.folder} has no classes in its {split} split.")
        spans = [np.array(span) for span in _spans(self.images, self.entries, split)]
        if self.digests.get(split) not in (None, _digest(spans)):
            raise DataError(
                f"{self.folder / 'images.npy'} is damaged: its {split} images are not those that were stored. "
                f"Delete {self.folder} and make the store again."
            )
        pieces = [torch.from_numpy(span) for span in spans]
        counts = torch.tensor([entry.count for entry in entries])
        return ClassSet(
            images=pieces[0] if len(pieces) == 1 else torch.cat(pieces),
            starts=counts.cumsum(0) - counts,
            counts=counts,
            names=tuple(entry.name for entry in entries),
            mean=torch.tensor(self.mean),
            std=torch.tensor(self.std),
        )


def _map(file: Path) -> np.ndarray:
    try:
        return np.load(file, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # a damaged header can raise anything
        raise DataError(f"{file} is damaged ({error}). Make the store again.") from error


def moments(images: np.ndarray, entries: Sequence[ClassEntry]) -> tuple[list[float], list[float]]:
    """Mean and standard deviation per channel, in 0..1, of the images of these classes.

    From the counts of the 256 levels, which do not depend on the order of addition.
    """
    counts = np.zeros((images.shape[1], 256), dtype=np.int64)
    for first, last in _runs(entries):
        # bincount makes eight bytes of each.
        for piece in _pieces(images[first:last], _CHUNK // 16):
            for channel, count in enumerate(counts):
                count += np.bincount(piece[:, channel].ravel(), minlength=256)
    levels = np.arange(256)
    mean = (counts @ levels) / counts.sum(1)
    variance = (counts @ levels**2) / counts.sum(1) - mean**2
    # A channel without contrast would be divided by zero; one level is the least contrast that can be stored.
    return (mean / 255).tolist(), (np.sqrt(np.maximum(variance, 1)) / 255).tolist()


def _check_moments(where: Path, mean: Sequence[float], std: Sequence[float], channels: int) -> None:
    finite = all(map(math.isfinite, (*mean, *std)))
    if not len(mean) == len(std) == channels or not finite or not all(value > 0 for value in std):
        raise DataError(
            f"{where}: mean {list(mean)} and std {list(std)} must have one value for each of {channels} "
            "channels, finite, and std above 0."
        )


def _check_classes(where: Path, entries: Sequence[ClassEntry], shape: Sequence[int]) -> None:
    """Raise a DataError unless the classes tile the images, in order."""
    if len(shape) != 4 or shape[2] != shape[3]:
        raise DataError(f"{where}: images must be [images, channels, size, size], not {list(shape)}.")
    start, names = 0, set()
    for entry in entries:
        if not isinstance(entry.name, str) or not type(entry.start) is type(entry.count) is int:
            raise DataError(f"{where}: a class has a name and whole numbers as start and count, not {entry}.")
        if entry.start != start or entry.count < 1:
            raise DataError(
                f"{where}: class {entry.name!r} says it has {entry.count} images from {entry.start}, where "
                f"image {start} was to be its first."
            )
        if entry.split not in SPLITS:
            raise DataError(
                f"{where}: class {entry.name!r} is in split {entry.split!r}, not in train, val or test."
            )
        if entry.name in names:
            raise DataError(f"{where}: there are two classes called {entry.name!r}; names must differ.")
        names.add(entry.name)
        start += entry.count
    if start != shape[0]:
        raise DataError(f"{where}: the classes have {start} images in all, and there are {shape[0]}.")


def _spans(images: np.ndarray, entries: Sequence[ClassEntry], split: Split) -> list[np.ndarray]:
    """The images of a split, in pieces that lie together."""
    return [images[first:last] for first, last in _runs([entry for entry in entries if entry.split == split])]


def _digest(spans: Iterable[np.ndarray]) -> str:
    found = hashlib.sha256()
    for span in spans:
        for piece in _pieces(span):
            found.update(piece.data)
    return found.hexdigest()


def _write_images(file: Path, images: Iterable[np.ndarray], shape: tuple[int, ...]) -> str:
    """Write the pieces as one npy file; return the checksum of its array."""
    digest, written = hashlib.sha256(), 0
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    with open(file, "wb") as out:
        np.lib.format.write_array_header_1_0(out, header)
        for piece in images:
            if piece.dtype != np.uint8 or piece.shape[1:] != shape[1:]:
                raise ValueError(f"a piece is {piece.dtype} {piece.shape}, not uint8 [*, {shape[1:]}]")
            data = np.ascontiguousarray(piece)
            digest.update(data.data)
            out.write(data.data)
            written += len(data)
        if written != shape[0]:
            raise ValueError(f"{written} images came, not {shape[0]}")
        _sync(out)
    return digest.hexdigest()


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _replace(made: Path, folder: Path) -> None:
    """Give the finished folder its name, unless the same store has come to be there meanwhile."""
    while True:
        try:
            made.rename(folder)
            break
        except OSError:
            if not folder.is_dir():
                raise
        if _same(made, folder):
            return
        with contextlib.suppress(FileNotFoundError):
            old = folder.with_name(f"{folder.name}{HALF_MADE}{uuid.uuid4().hex}")
            folder.rename(old)
            shutil.rmtree(old, ignore_errors=True)
    sync_folder(folder.parent)


def _same(made: Path, folder: Path) -> bool:
    """Whether `folder` holds, undamaged, the store that was made."""
    try:
        Store.open(folder).verify()
        return (made / "store.json").read_bytes() == (folder / "store.json").read_bytes()
    except (DataError, OSError):
        return False


def _sweep(folder: Path) -> None:
    """Remove what killed processes left half made; a day is longer than any that still runs."""
    for left in folder.parent.glob(f"{glob.escape(folder.name)}{HALF_MADE}*"):
        with contextlib.suppress(OSError):
            if max(path.stat().st_mtime for path in (left, *left.iterdir())) < time.time() - 86400:
                shutil.rmtree(left, ignore_errors=True)


def _pieces(images: np.ndarray, chunk: int = _CHUNK) -> Iterator[np.ndarray]:
    """The images in order, some megabytes at a time."""
    step = max(1, chunk // max(1, images[:1].nbytes))
    for first in range(0, len(images), step):
        yield np.ascontiguousarray(images[first : first + step])


def _runs(entries: Sequence[ClassEntry]) -> list[tuple[int, int]]:
    """Spans of images that neighbouring classes make up together."""
    spans: list[tuple[int, int]] = []
    for entry in entries:
        if spans and spans[-1][1] == entry.start:
            spans[-1] = (spans[-1][0], entry.start + entry.count)
        else:
            spans.append((entry.start, entry.start + entry.count))
    return spans
