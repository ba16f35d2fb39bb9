"""More than one process: torchrun starts them, the work of each step is divided over them, and all end the same.

    torchrun --nproc-per-node 2 -m -- npbml run --run runs/divided

(Without the two dashes torchrun takes --run for an option of its own.)
Every rank draws the same tasks and takes its part of them; what they find is summed, so that all take the same
step and hold the same state. Rank 0 alone writes and prints. The run folder and the data lie where every rank can
read them. Where there is one process, nothing is initialised and every function here gives back what it is given.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from npbml.errors import NpbmlError, SettingError

# For a process that hangs: of one that has ended the others hear at once. To make a data set may take minutes.
TIMEOUT = timedelta(minutes=30)
T = TypeVar("T")
_by_itself = ContextVar("by_itself", default=False)  # a thread beside the one that acts alone is not alone


class Lost(NpbmlError):
    """Another process of the run has ended, and this one cannot go on without it."""


def world() -> tuple[int, int]:
    """The rank of this process, and how many there are; outside `joined` it is the only one."""
    if _by_itself.get() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


@contextmanager
def joined() -> Iterator[None]:
    """Be one of the processes that torchrun has started, and named in RANK, LOCAL_RANK and WORLD_SIZE."""
    if "RANK" not in os.environ or int(os.environ["WORLD_SIZE"]) == 1:
        yield
        return
    # Imported later, it would keep the group as a default of its functions, and the group's threads to the end.
    import torch.distributed.nn.functional

    with _answered():
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=TIMEOUT)
    yield
    # Not after an error: others may be in the middle of a sum, and learn of it when this process has ended.
    dist.destroy_process_group()


def local_rank() -> int:
    """The number of this process among those on the same machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


def check_share(name: str, count: int) -> None:
    """Refuse to divide fewer things than there are ranks."""
    size = world()[1]
    if count < size:
        raise SettingError(
            f"{name} is {count}, which cannot be divided over {size} processes: each takes at least one. Start "
            f"torchrun with fewer of them, or raise {name}."
        )


def rank_slice(count: int) -> slice:
    """The part of `count` things in a row that is this rank's; parts differ by one at most."""
    rank, size = world()
    return slice(count * rank // size, count * (rank + 1) // size)


def sum_over_ranks(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Each tensor, summed over ranks: in one message, and to the same bits on all of them."""
    if world()[1] == 1:
        return list(tensors)
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    with _answered():
        dist.all_reduce(flat)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]


def mean_over_ranks(tensors: Sequence[Tensor], count: int) -> list[Tensor]:
    """Means over the tasks of all ranks, of means over the `count` tasks of this one."""
    if world()[1] == 1:
        return list(tensors)
    number, *sums = sum_over_ranks([tensors[0].new_full((), count), *(count * tensor for tensor in tensors)])
    return [tensor / number for tensor in sums]


def summed(tensor: Tensor) -> Tensor:
    """`tensor`, summed over ranks; the gradient of what all ranks make of the sum flows back to each."""
    return _Summed.apply(tensor)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return sum_over_ranks([tensor])[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return sum_over_ranks([gradient])[0]


def max_over_ranks(*values: float) -> tuple[float, ...]:
    """The highest of each value over ranks, so that all decide alike."""
    if world()[1] == 1:
        return values
    found = torch.tensor(values, dtype=torch.float64)
    with _answered():
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return tuple(found.tolist())


def gather(items: list[T]) -> list[T]:
    """The items of every rank, rank after rank."""
    size = world()[1]
    if size == 1:
        return items
    parts: list[list[T]] = [[] for _ in range(size)]
    with _answered():
        dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def on_rank_zero(act: Callable[[], T]) -> T | None:
    """What only one may do: rank 0 does it when all have come here, and what it raises all raise.

    Rank 0 has what `act` returns, and the others None. While it acts, it is as a process of its own.
    """
    rank, size = world()
    if size == 1:
        return act()
    max_over_ranks(0)
    result, error = None, [None]
    if rank == 0:
        token = _by_itself.set(True)
        try:
            result = act()
        except (NpbmlError, OSError) as raised:
            error = [raised]  # type: ignore[list-item]
        finally:
            _by_itself.reset(token)
    with _answered():
        dist.broadcast_object_list(error)
    if error[0] is not None:
        raise error[0]
    return result


def first_to_fail() -> bool:
    """Whether no other rank has asked this before: of an error that all meet, one tells."""
    if world()[1] == 1:
        return True
    try:
        return dist.distributed_c10d._get_default_store().add("failed", 1) == 1
    except RuntimeError:  # rank 0, which kept count, has ended, and has told why
        return False


@contextmanager
def _answered() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition(". ")[0]
        raise Lost(f"Another process of this run has ended, or does not answer: {reason}.") from error
