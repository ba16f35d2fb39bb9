"""Where a run computes, and what torch is told while it does."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from npbml.data.store import cache_folder
from npbml.devices import named_device
from npbml.engine.distributed import local_rank, world
from npbml.errors import SettingError


def choose_device(name: str) -> torch.device:
    """The device of that name; auto is a GPU where there is one. Of several processes each has its own GPU."""
    device, size = named_device(name), world()[1]
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


# cuBLAS works with 128 KiB a stream; the other size that gives the same bits every time is 32 MiB. In KiB, the
# second: it would ask for more, and warn of it.
WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "128"}


@contextmanager
def computing(device: torch.device, precision: str, deterministic: bool = True) -> Iterator[None]:
    """Have torch compute as a run asks for in a block, and as before after it.

    Args:
        device: On a CPU no flag is changed.
        precision: In float32 a GPU multiplies exactly; else it may round what it multiplies to TF32.
        deterministic: A GPU chooses algorithms that give the same bits every time, so that a resumed run ends the
            same.
    """
    # Set before torch's compiler is first imported, which an optimiser does: it would choose a folder of its own.
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(cache_folder() / "compiled")}
    if device.type == "cuda" and deterministic:
        variables |= WORKSPACES
    threads = torch.get_num_threads()
    with _environment(variables), _flags(device, precision, deterministic):
        try:
            yield
        finally:
            torch.set_num_threads(threads)  # workers on one core each have changed what new threads begin with


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that are not set already, for a block."""
    added = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def _flags(device: torch.device, precision: str, deterministic: bool) -> Iterator[None]:
    """Set the flags by which a GPU computes, for a block."""
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    strict = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        set_tf32(precision != "float32")
        if deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)
            # New tensors are not read before they are written: to fill them costs ResNet-12 a twentieth of a step.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
        torch.use_deterministic_algorithms(strict[0], warn_only=strict[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def set_tf32(allowed: bool) -> None:
    """Whether a GPU may round what it multiplies in single precision to TF32; inside `computing` alone."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed


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
