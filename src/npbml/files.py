"""Files that are whole or not there: written aside, synced, then renamed into place."""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

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


def save_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Tensors as safetensors, with what is to be known `about` them in the header."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    write_whole(path, save(plain, {"about": json.dumps(about, sort_keys=True)}))


def load_tensors(path: Path, device: torch.device | str = "cpu") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file and what its header says about them."""
    if not path.is_file():
        raise RunError(f"{path} is not there.")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            about = json.loads((file.metadata() or {})["about"])
            return {name: file.get_tensor(name) for name in file.keys()}, about  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise RunError(f"{path} is damaged or not one of npbml's files: {error}.") from None
