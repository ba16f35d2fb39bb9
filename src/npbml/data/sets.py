"""Data sets by name."""

import difflib
import os
from collections.abc import Callable
from pathlib import Path

from npbml.data.folder import folder_store
from npbml.data.glyphs import glyphs
from npbml.data.image_data import ImageData
from npbml.data.request import Request
from npbml.data.sinusoid import Sinusoids
from npbml.data.store import Store, data_root
from npbml.errors import DataError
from npbml.parts import DATASETS

EMBEDDED = "glyphs"
BENCHMARKS = ("mini-imagenet", "tiered-imagenet", "cifar-fs", "fc100", "omniglot")
NAMES = (EMBEDDED, *BENCHMARKS)
CACHED = (EMBEDDED, "folder-")
"""What the names of stores begin with that are made when they are needed."""


def open_dataset(
    name: str,
    *,
    root: str | Path | None = None,
    seed: int = 0,
    size: int = 84,
    channels: int | None = None,
    fractions: tuple[float, float, float] = (0.6, 0.2, 0.2),
    progress: Callable[[int, int], None] | None = None,
) -> Store:
    """The data set called `name`, or the pictures in the folder `name`, as a store.

    A name is that of the embedded data, of a benchmark or of the user's own data set that was prepared.

    `root` is where stores are kept (`data_root()` if not given). `seed` draws the glyphs, or deals the user's
    classes to the splits; `size`, `channels` and `fractions` are for the user's pictures alone, as
    `folder_store` takes them. `progress` is told how many classes are made, of how many.
    """
    root = Path(root or data_root())
    if name == EMBEDDED:
        return glyphs(root, seed, progress)
    if name in BENCHMARKS:
        if not (root / name).exists():
            raise DataError(
                f"{name} is not prepared: there is no {root / name}. {_available(root)} "
                f"`npbml data prepare {name} --source PATH` makes it from what you have downloaded."
            )
        return Store.open(root / name)
    path = Path(name).expanduser()
    if path.name == name and (root / name / "store.json").is_file():
        return Store.open(root / name)
    if (path / "store.json").is_file():
        return Store.open(path)
    if path.is_dir() or os.sep in name or name.startswith(("~", ".")):
        return folder_store(path, size, channels, fractions, seed, root, progress)
    close = difflib.get_close_matches(name, (*NAMES, *prepared(root)), 1)
    meant = f" Did you mean {close[0]!r}?" if close else ""
    names = dict.fromkeys((*NAMES, *prepared(root)))
    raise DataError(
        f"There is no data set {name!r}, nor a folder of that name.{meant} The names are {', '.join(names)}; "
        "for your own pictures, give the path of a folder that holds a folder for each class."
    )


def open_data(request: Request) -> ImageData | Sinusoids:
    """The data set that a run asks for: a registered one by its name, or a folder of pictures."""
    return DATASETS.get(request.name)(request) if request.name in DATASETS else open_store(request)


def open_store(request: Request) -> ImageData:
    """A data set that is kept as a store: the embedded one, a benchmark, or the user's own pictures."""
    return ImageData(open_dataset(request.name, size=request.size or 84, channels=request.channels), request)


def prepared(root: str | Path | None = None) -> list[str]:
    """The names of the data sets that were prepared: benchmarks first, then the user's own."""
    made = sorted(file.parent.name for file in Path(root or data_root()).glob("*/store.json"))
    own = [name for name in made if name not in BENCHMARKS and not name.startswith(CACHED)]
    return [*(name for name in BENCHMARKS if name in made), *own]


def _available(root: Path) -> str:
    here = [EMBEDDED, *prepared(root)]
    return f"Available are {', '.join(here)}, and any folder that holds a folder of images for each class."
