"""Tensors in files: safetensors, with what is to be known of them in the header."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from npbml.errors import RunError
from npbml.json_files import write_whole


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
