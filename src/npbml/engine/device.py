"""Where a run computes."""

import os

import torch

from npbml.errors import SettingError


def choose_device(name: str) -> torch.device:
    """The device of that name; auto is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise SettingError(f"device takes auto, cpu, cuda or cuda:N, not {name!r}.")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        there = f"this machine has {count} of them" if count else "this machine has none that torch can use"
        raise SettingError(f"device={name} asks for a GPU, but {there}. Use device=auto or device=cpu.")
    return device


def make_reproducible(device: torch.device) -> None:
    """Have a GPU choose algorithms that give the same bits every time, so that a resumed run ends the same."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)


def describe_device(device: torch.device) -> str:
    """The device in words, for results."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}"
