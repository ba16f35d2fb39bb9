"""The user's own pictures: a folder of class folders becomes a store."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from npbml.data.search import class_folders, no_pictures
from npbml.data.store import SPLITS, ClassEntry, Split, Store, data_root
from npbml.errors import DataError
from npbml.pictures import SUFFIXES, Encoded, check_size, is_grey, picture_bytes
from npbml.randomness import generator

_REVISION = 2  # 1: six or seven classes left one for validation and one for test
_FRACTIONS = (0.6, 0.2, 0.2)


def folder_store(
    path: str | Path,
    size: int,
    channels: int | None = None,
    fractions: tuple[float, float, float] = _FRACTIONS,
    seed: int = 0,
    root: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Store:
    """The pictures below `path` as a store of size x size images, in `root` (`data_root()` if not given).

    `path` holds train/, val/ and test/, each with a folder for every class; or the class folders themselves,
    whose classes are then dealt to the splits by `fractions` and `seed`. `channels` is 1 (grey) or 3
    (colour); None means colour if any picture is. The store is made again when a file or an option has
    changed. `progress` is told how many classes are read, of how many.
    """
    path = Path(path).expanduser().resolve()
    _check_options(size, channels, fractions)
    if not path.is_dir():
        raise DataError(f"There is no folder {path}. Give a folder that holds a folder of images for each class.")
    classes = _classes(path, fractions, seed)
    files = [file for _, _, members in classes for file in members]
    key = _key(path, files, [size, channels, list(fractions), seed])
    folder = Path(root or data_root()) / f"folder-{re.sub(r'[^A-Za-z0-9_.-]+', '-', path.name)}-{key[:16]}"
    provenance = {"folder": str(path), "revision": _REVISION, "key": key}
    try:
        store = Store.open(folder)
        if store.provenance == provenance:
            return store
    except DataError:
        pass  # missing or damaged: the pictures are still here
    return _write(folder, path.name, classes, size, channels, provenance, progress)


def named_store(
    name: str,
    path: Path,
    size: int,
    channels: int | None = None,
    fractions: tuple[float, float, float] = _FRACTIONS,
    seed: int = 0,
    root: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    origin: str | None = None,
) -> Store:
    """The pictures below `path` as the store `name` in `root`; otherwise as `folder_store`.

    It does not depend on where the pictures lie, and stays what it is until it is made again. `origin` is
    what they are called in its provenance (the name of the folder if not given).
    """
    _check_options(size, channels, fractions)
    classes = _classes(path, fractions, seed)
    files = [file for _, _, members in classes for file in members]
    provenance = {
        "layout": "class folders",
        "files": [
            {"name": origin or path.name, "files": len(files), "bytes": sum(file.stat().st_size for file in files)}
        ],
        "fractions": list(fractions),
        "seed": seed,
        "revision": _REVISION,
    }
    return _write(Path(root or data_root()) / name, name, classes, size, channels, provenance, progress)


def _write(
    folder: Path,
    name: str,
    classes: list[tuple[str, Split, list[Path]]],
    size: int,
    channels: int | None,
    provenance: dict[str, object],
    progress: Callable[[int, int], None] | None,
) -> Store:
    if channels is None:
        channels = 1 if all(is_grey(file) for _, _, members in classes for file in members) else 3
    entries, start = [], 0
    for label, split, members in classes:
        entries.append(ClassEntry(label, split, start, len(members)))
        start += len(members)
    return Store.write(
        folder,
        name=name,
        images=read_pictures_by_class([members for _, _, members in classes], size, channels, progress),
        shape=(start, channels, size, size),
        classes=entries,
        provenance=provenance,
    )


def read_pictures_by_class(
    classes: Sequence[Sequence[Path | Encoded]],
    size: int,
    channels: int,
    progress: Callable[[int, int], None] | None = None,
    resample: Image.Resampling = Image.Resampling.BILINEAR,
) -> Iterator[np.ndarray]:
    """The pictures of one class after another, uint8 [images, channels, size, size]."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done, members in enumerate(classes):
            read = pool.map(lambda file: picture_bytes(file, size, channels, resample), members)
            yield np.stack(list(read))
            if progress:
                progress(done + 1, len(classes))


def _check_options(size: int, channels: int | None, fractions: tuple[float, float, float]) -> None:
    check_size(size, 3 if channels is None else channels)
    if len(fractions) != 3 or not all(part > 0 for part in fractions) or abs(sum(fractions) - 1) > 1e-6:
        raise DataError(f"fractions is {fractions}; give three parts for train, val and test that add up to 1.")


def _classes(path: Path, fractions: tuple[float, float, float], seed: int) -> list[tuple[str, Split, list[Path]]]:
    """(name, split, image files) of every class, split by split."""
    parts = _given(path) if is_split(path) else _dealt(path, class_folders(path), fractions, seed)
    seen: dict[str, Path] = {}
    classes: list[tuple[str, Split, list[Path]]] = []
    for split in SPLITS:
        for folder in parts[split]:
            if folder.name in seen:
                raise DataError(
                    f"Class {folder.name!r} is in two splits, {seen[folder.name]} and {folder}. "
                    "The splits must share no class: move its images to one of them."
                )
            seen[folder.name] = folder
            classes.append((folder.name, split, _images(folder)))
    return classes


def folder_classes(
    path: Path, fractions: tuple[float, float, float] = _FRACTIONS, seed: int = 0
) -> list[tuple[str, Split, int]]:
    """The name, the split and the number of pictures of every class, as `folder_store` has them."""
    return [(name, split, len(files)) for name, split, files in _classes(path, fractions, seed)]


def is_split(path: Path) -> bool:
    """Whether a folder holds train/, val/ and test/, and not the class folders themselves."""
    # A flat folder may well have a class called "test"; but then there are pictures in it, not folders.
    return any(folder.name in SPLITS and class_folders(folder) for folder in class_folders(path))


def _given(path: Path) -> dict[Split, list[Path]]:
    """The class folders below train/, val/ and test/."""
    parts: dict[Split, list[Path]] = {}
    for split in SPLITS:
        if not (path / split).is_dir():
            raise DataError(f"{path} is split by folders, but {path / split} is missing. Add it with its classes.")
        parts[split] = class_folders(path / split)
        if not parts[split]:
            raise DataError(f"{path / split} has no class folders. Add a folder of images for each class.")
    return parts


def _dealt(
    path: Path, folders: list[Path], fractions: tuple[float, float, float], seed: int
) -> dict[Split, list[Path]]:
    """The class folders of a flat folder dealt to the splits: at least one to each, and at least two, of which a
    task can be made, where its share is more than one."""
    if not folders:
        raise DataError(f"{path} has no class folders. It must hold a folder of images for each class.")
    if len(folders) < len(SPLITS):
        raise DataError(
            f"{path} has {len(folders)} class folders ({', '.join(folder.name for folder in folders)}), "
            "and train, val and test need at least one each: 3 in all. Add classes."
        )
    total = len(folders)
    val, test = (max(2 if part * total > 1 else 1, round(part * total)) for part in fractions[1:])
    # Rounding up a small part must not leave nothing to train on.
    while val + test >= total:
        val, test = (val - 1, test) if val >= test else (val, test - 1)
    order = torch.randperm(total, generator=generator(seed, "folder")).tolist()
    counts = {"train": total - val - test, "val": val, "test": test}
    parts: dict[Split, list[Path]] = {}
    for split in SPLITS:
        parts[split] = sorted(folders[place] for place in order[: counts[split]])
        order = order[counts[split] :]
    return parts


def _images(folder: Path) -> list[Path]:
    """The image files of a class, by name; other files, such as .DS_Store, do not count."""
    files = sorted(
        item
        for item in folder.iterdir()
        if item.suffix.lower() in SUFFIXES and not item.name.startswith(".") and item.is_file()
    )
    if not files:
        raise no_pictures(folder)
    return files


def _key(path: Path, files: list[Path], options: list[object]) -> str:
    """What the store depends on, as one name."""
    stats = [(str(file), status.st_size, status.st_mtime_ns) for file in files for status in (file.stat(),)]
    return hashlib.sha256(json.dumps([str(path), _REVISION, options, stats]).encode()).hexdigest()
