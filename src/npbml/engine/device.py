"""Where a run computes."""

import os

import torch
from torch import nn

from npbml.engine.distributed import local_rank, world
from npbml.errors import SettingError


def choose_device(name: str) -> torch.device:
    """The device of that name; auto is a GPU where there is one. Of several processes each has its own GPU."""
    device, size = _named(name), world()[1]
    if device.type == "cpu" or size == 1:
        return device
    if device.index is not None:
        raise SettingError(
            f"device={name} is one GPU for {size} processes: use device=auto, each then has its own."
        )
    count = torch.cuda.device_count()
    if local_rank() >= count:
        raise SettingError(
            f"There are more processes on this machine than the GPUs it has, {count}: start torchrun with "
            f"--nproc-per-node {count}, or use device=cpu."
        )
    torch.cuda.set_device(local_rank())
    return torch.device("cuda", local_rank())


def _named(name: str) -> torch.device:
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
        small_workspace()
        torch.use_deterministic_algorithms(True, warn_only=True)
        # New tensors are not read before they are written: to fill them costs ResNet-12 a twentieth of a step.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def small_workspace() -> None:
    """Have cuBLAS work with 128 KiB a stream; the other size that gives the same bits every time is 32 MiB."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "128")  # KiB: it would ask for more, and warn of it


def set_precision(precision: str) -> None:
    """Whether a GPU may round what it multiplies in single precision to TF32."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "float32"


def placed(module: nn.Module, device: torch.device) -> None:
    """Move a network to where it is trained; on a GPU its filters have channels last."""
    module.to(device)
    if device.type == "cuda":
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def in_precision(precision: str, device: torch.device) -> torch.autocast:
    """A context in which convolutions and products are computed in bfloat16, where that is the precision."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")


def describe_device(device: torch.device) -> str:
    """The device in words, for results."""
    threads, size = torch.get_num_threads(), world()[1]
    one = f"CPU, {threads} thread{'s' if threads > 1 else ''}"
    if device.type == "cuda":
        one = torch.cuda.get_device_name(device)
    return one if size == 1 else f"{size} x {one}"
