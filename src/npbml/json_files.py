"""Files that are whole or not there: written aside, synced, then renamed into place."""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from npbml.errors import RunError

SEAL = "sha256"
"""The entry that holds the digest of the others."""


def write_whole(path: Path, content: bytes) -> None:
    """Replace `path` by `content` at once: a reader, or a crash, meets the old file or the new one."""
    aside = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(aside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise RunError(
            f"{path} could not be saved: {error.strerror}. What was saved before is whole; "
            "make room or choose another folder, then give the same command again."
        ) from None


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
