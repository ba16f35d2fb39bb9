"""Move or link pictures into the folders of their classes, without ever overwriting a file."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal

from npbml.errors import DataError

How = Literal["move", "link"]


@dataclass
class Filed:
    """What has been done.

    Attributes:
        done: Where each file is now, or has a link, by where it was.
        copied: Those of `done` that were copied, where links are not possible.
        failed: Files with which nothing was done, each with the reason.
    """

    done: dict[Path, Path]
    copied: int
    failed: dict[Path, str]


def plan_filing(labels: Mapping[Path, str], into: Path) -> dict[Path, Path]:
    """Return where each file goes: FOLDER/LABEL/NAME, or NAME-2 and so on where that name is taken.

    A file that lies there already, or has a link there, is left out.

    Args:
        labels: The class of each file.
        into: The folder below which the class folders are, or will be.

    Raises:
        DataError: A class has a name that no folder can have.
    """
    for name in dict.fromkeys(labels.values()):
        if name in ("", ".", "..") or "/" in name or "\0" in name or os.sep in name:
            raise DataError(f"The class {name!r} cannot be the name of a folder: leave --move and --link out.")
    planned: dict[Path, Path] = {}
    names: dict[Path, Iterator[Path]] = {}  # those that are left: ten thousand files may all have the same one
    for file, name in labels.items():
        wanted = into / name / file.name
        if _is_same(file, wanted):
            continue
        for target in names.setdefault(wanted, _names(wanted)):
            if not os.path.lexists(target):
                planned[file] = target
                break
            if _is_same(file, target):
                break
    return planned


def file_pictures(planned: Mapping[Path, Path], how: How) -> Filed:
    """Move or link files as planned. A name that has been taken in the meantime is numbered again."""
    filed = Filed({}, 0, {})
    for file, wanted in planned.items():
        try:
            wanted.parent.mkdir(parents=True, exist_ok=True)
            for target in _names(wanted):
                try:
                    copied = _move(file, target) if how == "move" else _link(file, target)
                except FileExistsError:
                    continue
                filed.done[file] = target
                filed.copied += copied
                break
        except OSError as error:
            filed.failed[file] = error.strerror or str(error)
    return filed


def _names(path: Path) -> Iterator[Path]:
    """a.jpg, a-2.jpg, a-3.jpg, ..."""
    yield path
    for number in count(2):
        yield path.with_name(f"{path.stem}-{number}{path.suffix}")


def _is_same(file: Path, target: Path) -> bool:
    try:
        return file.samefile(target)
    except OSError:
        return False  # a link to nowhere


def _move(file: Path, target: Path) -> bool:
    """Move a file to a name that must not be there."""
    if file.is_symlink():  # a relative one would point elsewhere from there
        os.symlink(file.resolve(), target)
    else:
        try:
            os.link(file, target)  # unlike a rename, it does not replace what is there
        except FileExistsError:
            raise
        except OSError:  # another disk, or one without hard links
            _copy(file, target)
    file.unlink()
    return False


def _link(file: Path, target: Path) -> bool:
    """Link to a file from a name that must not be there, or copy it. Returns whether it was copied."""
    try:
        os.symlink(file.resolve(), target)
    except FileExistsError:
        raise
    except (OSError, NotImplementedError):
        _copy(file, target)
        return True
    return False


def _copy(file: Path, target: Path) -> None:
    """Copy a file to a name that must not be there; nothing is left of it where that fails."""
    with open(target, "xb") as copy:
        try:
            with open(file, "rb") as original:
                shutil.copyfileobj(original, copy)
            copy.flush()
            os.fsync(copy.fileno())
        except BaseException:
            target.unlink()
            raise
    with contextlib.suppress(OSError):
        shutil.copystat(file, target)
