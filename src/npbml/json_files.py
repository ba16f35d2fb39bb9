"""Files that are whole or not there: written aside, synced, then renamed into place."""

import contextlib
import errno
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from npbml.errors import RunError

PART = ".part"  # how the names of files end that are being written
SEAL = "sha256"  # the entry that holds the digest of the others


def write_whole(path: Path, content: bytes) -> None:
    """Replace `path` by `content` at once: a reader, or a crash, meets the old file or the new one.

    When it returns, the new one is on disk. Two processes that write the same file do not meet in one file aside.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{PART}")
    with saving(path):
        try:
            make_folder(path.parent)
            with open(aside, "wb") as file:
                file.write(content)
                sync_file(file)
            os.replace(aside, path)
            sync_folder(path.parent)
        except OSError:
            with contextlib.suppress(OSError):
                aside.unlink()
            raise


@contextlib.contextmanager
def saving(path: Path) -> Iterator[None]:
    """Turn an error of the disk into one sentence that names the file."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{path} could not be saved: {error.strerror or error}. What was saved before is whole; "
            "make room or choose another folder, then give the same command again."
        ) from None


def sync_file(file: Any) -> None:
    """Have all that was written to an open file on disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Have the names of the files in a folder on disk, where the platform allows it."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    number = os.open(folder, os.O_DIRECTORY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that cannot
            raise
    finally:
        os.close(number)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, each with its name on disk."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    for one in reversed(missing):
        one.mkdir(exist_ok=True)
        sync_folder(one.parent)
    folder.mkdir(exist_ok=True)  # or an error that says that it is a file


def remove_parts(folder: Path) -> None:
    """Remove what killed processes left half written below a folder that no other process may write to."""
    for part in folder.rglob(f".*{PART}"):
        if _left_over(part):
            with contextlib.suppress(OSError):
                part.unlink()


def _left_over(part: Path) -> bool:
    """Whether the process that began a file is dead; in a container all processes may have this one's number."""
    number = part.name.removesuffix(PART).rpartition(".")[2].partition("-")[0]
    if not number.isdecimal() or int(number) == os.getpid():
        return True  # the first is a name that version 0.1 gave
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def write_json(path: Path, data: Any) -> None:
    write_whole(path, (json.dumps(data, indent=2) + "\n").encode())


def read_json(path: Path) -> Any:
    """Read plain data from a JSON file; that of a sealed table is compared with its digest, which is left out.

    Raises:
        RunError: The file is not there, or damaged.
    """
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path} is not there.") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}.") from None
    return unsealed(data, path)


def sealed(data: Mapping[str, Any]) -> dict[str, Any]:
    """A table with a digest of it as its last entry, for files that only npbml writes."""
    return {**data, SEAL: _digest(json.loads(json.dumps(data)))}


def unsealed(data: Any, path: Path) -> Any:
    """Plain data without its digest, which must be right; data that have none are returned as they are."""
    if not isinstance(data, dict) or SEAL not in data:
        return data
    plain = {name: value for name, value in data.items() if name != SEAL}
    if data[SEAL] != _digest(plain):
        raise RunError(f"{path} cannot be read: its digest is not that of its content. It was damaged or edited.")
    return plain


def parse_json(text: str) -> Any:
    """The data in a JSON text.

    Raises:
        ValueError: It is no JSON, nested too deeply, has a name twice, or text that is no Unicode.
    """
    try:
        data = json.loads(text, object_pairs_hook=_table)
        if "\\ud" in text.lower():  # half of a pair of surrogates can be read, and neither printed nor written
            json.dumps(data, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return data


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has the name {next(name for name in names if names.count(name) > 1)!r} twice")
    return table


def _digest(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
