"""Files that are whole or not there: written aside, synced, then renamed into place."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from npbml.errors import RunError


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
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path} is not there.") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}.") from None
