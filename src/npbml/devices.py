"""Devices by name."""

import torch

from npbml.errors import SettingError


def named_device(name: str) -> torch.device:
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
