"""Tensors in files: safetensors, with what is to be known of them, and a digest of it all, in the header."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from npbml.errors import RunError
from npbml.json_files import SEAL, parse_json, write_whole


def save_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Tensors as safetensors, with what is to be known `about` them in the header, and a digest of both."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    about = json.loads(json.dumps(about))  # as it will be read: names are text
    sealed = {**about, SEAL: digest(plain, about)}
    write_whole(path, save(plain, {"about": json.dumps(sealed, sort_keys=True)}))


def load_tensors(path: Path, device: torch.device | str = "cpu") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file and what its header says about them.

    Files of version 0.1 have no digest and are read as they are.

    Raises:
        RunError: The file is not there, is not one of npbml's, or its content is not that of its digest.
    """
    if not path.is_file():
        raise RunError(f"{path} is not there.")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            about = parse_json((file.metadata() or {})["about"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except KeyError:
        raise _damaged(path, "its header has no metadata of npbml") from None
    # safetensors leaves sizes that are no sizes to torch.
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError, MemoryError) as error:
        raise _damaged(path, str(error).rstrip(".")) from None
    if not isinstance(about, dict):
        raise _damaged(path, "its metadata are not a table")
    told = about.pop(SEAL, None)
    if told is not None and told != digest(tensors, about):
        raise _damaged(path, "its digest is not that of its content; get or make the file again")
    return {name: tensor.to(device) for name, tensor in tensors.items()}, about


def digest(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> str:
    """SHA-256 over the metadata and every tensor: its name, kind, shape and bytes. 50 MB take 0.03 s."""
    found = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def check_weights(path: Path, tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor] | None = None) -> None:
    """Refuse weights that are not finite, or not of the kind of those `wanted`, by their name.

    Floating point of any precision is of one kind; other dtypes must be the same.

    Raises:
        RunError: A tensor is none that a network can have.
    """
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise _damaged(path, f"its tensor {name!r} has values that are not finite")
        like = (wanted or {}).get(name)
        if like is None or tensor.dtype == like.dtype or (tensor.is_floating_point() and like.is_floating_point()):
            continue
        raise _damaged(path, f"its tensor {name!r} is of {tensor.dtype}, where {like.dtype} was expected")


def is_finite(tensor: Tensor) -> bool:
    """Whether no number of a tensor is NaN or infinite."""
    return not (tensor.is_floating_point() or tensor.is_complex()) or bool(tensor.isfinite().all())


def _damaged(path: Path, why: str) -> RunError:
    return RunError(f"{path} is damaged or not one of npbml's files: {why}.")
