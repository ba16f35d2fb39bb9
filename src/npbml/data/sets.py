"""Data sets by name."""

import difflib
import os
from collections.abc import Callable
from pathlib import Path

from npbml.data.folder import folder_store
from npbml.data.glyphs import glyphs
from npbml.data.store import Store, data_root
from npbml.errors import DataError

EMBEDDED = "glyphs"
BENCHMARKS = ("mini-imagenet", "tiered-imagenet", "cifar-fs", "fc100", "omniglot")
NAMES = (EMBEDDED, *BENCHMARKS)


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

    `root` is where stores are kept (`data_root()` if not given). `seed` draws the glyphs, or deals the user's
    classes to the splits; `size`, `channels` and `fractions` are for the user's pictures alone, as
    `folder_store` takes them. `progress` is told how many classes are made, of how many.
    """
    root = Path(root or data_root())
    if name == EMBEDDED:
        return glyphs(root, seed, progress)
    if name in BENCHMARKS:
        if not (root / name).exists():
            raise DataError(f"{name} is not prepared: there is no {root / name}. {_available(root)}")
        return Store.open(root / name)
    path = Path(name).expanduser()
    if (path / "store.json").is_file():
        return Store.open(path)
    if path.is_dir() or os.sep in name or name.startswith(("~", ".")):
        return folder_store(path, size, channels, fractions, seed, root, progress)
    close = difflib.get_close_matches(name, NAMES, 1)
    meant = f" Did you mean {close[0]!r}?" if close else ""
    raise DataError(
        f"There is no data set {name!r}, nor a folder of that name.{meant} The names are {', '.join(NAMES)}; "
        "for your own pictures, give the path of a folder that holds a folder for each class."
    )


def _available(root: Path) -> str:
    here = [EMBEDDED, *(name for name in BENCHMARKS if (root / name / "store.json").is_file())]
    return f"Available are {', '.join(here)}, and any folder that holds a folder of images for each class."
