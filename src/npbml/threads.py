"""Work that does not grow with a core count by itself, spread over the cores of a CPU."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def each_in_a_thread(function: Callable[..., T], items: Iterable[tuple[Any, ...]], on_cpu: bool = True) -> list[T]:
    """function(*item) for every item, as many at a time as torch has threads, each on one core.

    For convolutions of a task's few small images, two items on a core each were nearly twice as fast as both
    cores on one item after another. Work that is not the CPU's is done in order.
    """
    items, threads = list(items), torch.get_num_threads()
    if threads == 1 or len(items) == 1 or not on_cpu:
        return [function(*item) for item in items]
    lower, precision = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    graded = torch.is_grad_enabled()

    def one(item: tuple[Any, ...]) -> T:
        # A thread does not take these over by itself.
        with torch.autocast("cpu", precision, enabled=lower), torch.set_grad_enabled(graded):
            return function(*item)

    return list(_pool(threads).map(one, items))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, initializer=lambda: torch.set_num_threads(1))


@contextmanager
def one_core() -> Iterator[None]:
    """Leave the other cores to other threads: two that both spread over all of them wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
