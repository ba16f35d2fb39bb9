"""Make a store of a benchmark, or of one's own pictures, from what was downloaded."""

import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from npbml.data.archives import Files, is_archive, open_files, unpack
from npbml.data.benchmarks import PUBLISHED, Benchmark
from npbml.data.folder import named_store
from npbml.data.readers import cifar, folders, mini_imagenet, omniglot, tiered_imagenet
from npbml.data.reading import Reader, Reading
from npbml.data.sets import CACHED
from npbml.data.store import HALF_MADE, ClassEntry, Store, data_root
from npbml.errors import DataError

_REVISION = 1
READERS: dict[str, tuple[Reader, ...]] = {
    "mini-imagenet": (mini_imagenet.read_cache, mini_imagenet.read_csv, folders.read),
    "tiered-imagenet": (tiered_imagenet.read_pickles, tiered_imagenet.read_npz, folders.read),
    "cifar-fs": (cifar.read_python, cifar.read_binary),
    "fc100": (cifar.read_python, cifar.read_binary),
    "omniglot": (omniglot.read,),
}
LAYOUTS = {
    "mini-imagenet": "mini-imagenet-cache-{train,val,test}.pkl; or images/ with train.csv, val.csv and test.csv; "
    "or train/, val/ and test/ with a folder for each class",
    "tiered-imagenet": "{train,val,test}_images_png.pkl or {train,val,test}_images.npz, with "
    "{train,val,test}_labels.pkl; or train/, val/ and test/ with a folder for each class",
    "cifar-fs": "cifar-100-python/ with train, test and meta; or cifar-100-binary/ with train.bin, test.bin and "
    "fine_label_names.txt; or either as .tar.gz",
    "omniglot": "images_background.zip and images_evaluation.zip, or the two folders in them",
}
LAYOUTS["fc100"] = LAYOUTS["cifar-fs"]
# Files by which a data set is known, so that a wrong one can be called by its name.
_SIGNS = {
    "data_batch_1": "CIFAR-10",
    "data_batch_1.bin": "CIFAR-10",
    "batches.meta": "CIFAR-10",
    "fine_label_names.txt": "CIFAR-100 (binary)",
    "mini-imagenet-cache-train.pkl": "mini-ImageNet (cache)",
    "train_images_png.pkl": "tiered-ImageNet (pickles)",
    "train_images.npz": "tiered-ImageNet (npz)",
    "images_background.zip": "Omniglot",
    "images_evaluation.zip": "Omniglot",
}


def prepare(
    name: str,
    source: str | Path,
    root: str | Path | None = None,
    size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    *,
    channels: int | None = None,
    fractions: tuple[float, float, float] = (0.6, 0.2, 0.2),
    seed: int = 0,
) -> Store:
    """Make the store `name` in `root` (`data_root()` if not given) from a folder or an archive.

    `name` is a benchmark, whose layout is found in `source`, in its archives or in a folder within; or a name
    of the user's own for a folder of class folders, which `channels`, `fractions` and `seed` are for, as
    `folder_store` takes them. `size` is the height and width of the images: that of the benchmark, or 84, if
    not given. `progress` is told how many classes are made, of how many. The store is there whole or not at
    all, and one of the same name is replaced.
    """
    source, folder = Path(source).expanduser().resolve(), Path(root or data_root()) / name
    if name not in PUBLISHED:
        _check_name(name)
    if size is not None and size < 1:
        raise DataError(f"size is {size}; images need at least 1 pixel a side.")
    if not source.exists():
        raise DataError(f"There is no {source}. Give the folder or the archive that was downloaded.")
    # Swept away with the half-made stores if this process is killed.
    room = folder.with_name(f"{folder.name}{HALF_MADE}{uuid.uuid4().hex}")
    try:
        if benchmark := PUBLISHED.get(name):
            return _benchmark(benchmark, source, folder, size or benchmark.size, room, progress)
        top = _pictures(source, room)
        return named_store(name, top, size or 84, channels, fractions, seed, root, progress, source.name)
    finally:
        shutil.rmtree(room, ignore_errors=True)


def _benchmark(
    benchmark: Benchmark,
    source: Path,
    folder: Path,
    size: int,
    room: Path,
    progress: Callable[[int, int], None] | None,
) -> Store:
    with closing(open_files(source, benchmark.archives, room)) as files:
        for reader in READERS[benchmark.name]:
            if reading := reader(files, benchmark, size):
                break
        else:
            raise _not_found(benchmark, files)
        entries = _rotated(reading.entries, benchmark.rotations)
        last = entries[-1]
        return Store.write(
            folder,
            name=benchmark.name,
            images=_told(_rotations(reading.images, benchmark.rotations), len(reading.entries), progress),
            shape=(last.start + last.count, benchmark.channels, size, size),
            classes=entries,
            mean=benchmark.mean,
            std=benchmark.std,
            provenance=_provenance(reading),
        )


def _rotated(entries: Sequence[ClassEntry], rotations: int) -> list[ClassEntry]:
    """Each class once for every position, those of a class next to one another and in one split."""
    if rotations == 1:
        return list(entries)
    made: list[ClassEntry] = []
    start = 0
    for entry in entries:
        for turn in range(rotations):
            made.append(
                ClassEntry(f"{entry.name}/rot{90 * turn:03}", entry.split, start, entry.count, entry.superclass)
            )
            start += entry.count
    return made


def _rotations(images: Iterator[np.ndarray], rotations: int) -> Iterator[np.ndarray]:
    """Each piece as it is, then turned by 90 degrees against the clock, and so on."""
    if rotations == 1:
        return images
    return (np.concatenate([np.rot90(piece, turn, (2, 3)) for turn in range(rotations)]) for piece in images)


def _told(
    images: Iterator[np.ndarray], total: int, progress: Callable[[int, int], None] | None
) -> Iterator[np.ndarray]:
    for done, piece in enumerate(images):
        yield piece
        if progress:
            progress(done + 1, total)


def _provenance(reading: Reading) -> dict[str, Any]:
    """What the store was made from, by name and size; pictures by the folder that they lie in."""
    if len(reading.files) <= 16:
        files = [{"name": member.path, "bytes": member.size} for member in reading.files]
    else:
        tops: dict[str, list[int]] = {}
        for member in reading.files:
            tops.setdefault(member.path.split("/")[0], []).append(member.size)
        files = [{"name": top, "files": len(sizes), "bytes": sum(sizes)} for top, sizes in sorted(tops.items())]
    return {"layout": reading.layout, "files": files, "revision": _REVISION}


def _not_found(benchmark: Benchmark, files: Files) -> DataError:
    known = sorted({_SIGNS[member.name] for member in files if member.name in _SIGNS})
    if not known and files.together("meta", "train", "test"):
        known = ["CIFAR-100 (python)"]
    names = sorted({member.path for member in files})
    some = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    found = f"looks like {' and '.join(known)}" if known else f"holds {some or 'no files'}"
    return DataError(
        f"{files.source} {found}, and no layout of {benchmark.name} is in it. Expected: {LAYOUTS[benchmark.name]}."
    )


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name) or name.startswith(CACHED):
        raise DataError(
            f"{name!r} cannot be the name of a data set: use letters, digits, '-', '_' and '.', and do not begin "
            f"with 'glyphs' or 'folder-'. The benchmarks are {', '.join(PUBLISHED)}."
        )


def _pictures(source: Path, room: Path) -> Path:
    """The folder of class folders in `source`; an archive is unpacked into `room`."""
    if source.is_file():
        if not is_archive(source):
            raise DataError(
                f"{source} is neither a folder nor an archive. Give a folder that holds class folders."
            )
        unpack(source, room)
        source = room
    while True:
        inner = [item for item in source.iterdir() if not item.name.startswith((".", "__"))]
        if len(inner) != 1 or not inner[0].is_dir():
            return source
        source = inner[0]
