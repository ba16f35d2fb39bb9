"""The picture files below a folder, found by their endings, and what is passed over."""

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from npbml.errors import DataError
from npbml.pictures import SUFFIXES

_SYSTEM_FOLDERS = ("__MACOSX", "@eaDir", "$RECYCLE.BIN")
_SYSTEM_FILES = ("thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r")  # in lower case


@dataclass
class Found:
    """What a search has found.

    Attributes:
        files: The picture files, in the order of their paths.
        ignored: How many files have another ending, by the ending in lower case ("" where there is none).
        unreadable: Folders that cannot be listed, each with the reason.
    """

    files: list[Path] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)
    unreadable: dict[Path, str] = field(default_factory=dict)


def find_pictures(path: Path, leave_out: Iterable[Path] = ()) -> Found:
    """Return the picture files below a folder, or the one file that `path` is.

    Hidden files and folders, and those of operating systems, are passed over in silence. Links are followed, each
    folder is visited once.

    Args:
        path: A folder, or a file with any ending.
        leave_out: Folders below `path` that are not searched; they need not be there.

    Raises:
        DataError: There is no such file or folder.
    """
    if not path.exists():
        raise DataError(f"There is no picture or folder {path}.")
    if not path.is_dir():
        return Found([path])
    found = Found()
    seen = {_identity(path)}
    seen |= {_identity(folder) for folder in leave_out if folder.is_dir()}
    links: list[str] = []  # to folders; followed last, so that a folder is known by its own path

    def refused(error: OSError) -> None:
        found.unreadable[Path(str(error.filename))] = error.strerror or str(error)

    def search(start: str) -> None:
        for folder, below, names in os.walk(start, onerror=refused):
            paths = [os.path.join(folder, name) for name in sorted(below) if not _is_system(name, _SYSTEM_FOLDERS)]
            links.extend(path for path in paths if os.path.islink(path))
            below[:] = [
                os.path.basename(path) for path in paths if not os.path.islink(path) and _is_new(path, seen)
            ]
            for name in names:
                _note(Path(folder, name), found)

    search(str(path))
    while links:
        link = links.pop(0)
        if _is_new(link, seen):
            search(link)
    found.files.sort()
    return found


def _note(file: Path, found: Found) -> None:
    """Put a file to those that were found, ignored or are unreadable."""
    if _is_system(file.name.lower(), _SYSTEM_FILES):
        return
    if file.suffix.lower() not in SUFFIXES:
        found.ignored[file.suffix.lower()] += 1
    elif file.is_file():
        found.files.append(file)
    elif file.is_symlink():
        found.unreadable[file] = "it is a link to a file that is not there"


def find_classes(path: Path) -> dict[str, Found]:
    """Return the picture files of each class folder below `path`, by the name of the class.

    Raises:
        DataError: There is no such folder, it has no class folders, or one of them has no pictures.
    """
    if not path.is_dir():
        raise DataError(f"There is no folder {path}. Give a folder that holds a folder of images for each class.")
    folders = class_folders(path)
    if not folders:
        raise DataError(f"{path} has no class folders. It must hold a folder of images for each class.")
    classes = {folder.name: find_pictures(folder) for folder in folders}
    for folder in folders:
        if not classes[folder.name].files:
            raise no_pictures(folder)
    return classes


def class_folders(path: Path) -> list[Path]:
    """Return the folders in `path` that are not a system's own, by name."""
    return sorted(
        item
        for item in path.iterdir()
        if item.is_dir() and not item.name.startswith("__") and not _is_system(item.name, _SYSTEM_FOLDERS)
    )


def no_pictures(folder: Path) -> DataError:
    """Return the error of a folder without pictures."""
    return DataError(f"The folder {folder} has no images ({', '.join(SUFFIXES)}). Add some or remove the folder.")


def _is_system(name: str, names: Iterable[str]) -> bool:
    return name.startswith(".") or name in names


def _identity(path: str | Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _is_new(path: str, seen: set[tuple[int, int]]) -> bool:
    """Whether a folder has not been visited by another way; then it is noted."""
    try:
        identity = _identity(path)
    except OSError:
        return False  # a link to nowhere
    if identity in seen:
        return False
    seen.add(identity)
    return True
