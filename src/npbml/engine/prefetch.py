"""The next tasks are made ready while the present ones are learned from."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Prefetch(Generic[T]):
    """`make(index)` computed one index ahead, in a thread of its own that uses one core.

    A meta-step of small tensors is a long chain of short operations: it gains nothing from a second core,
    which is free for the stem and the relation network. On 2 cores this took a meta-step of the quick protocol
    from 220 to 130 ms.
    """

    def __init__(self, make: Callable[[int], T]) -> None:
        self.make = make
        self.thread = ThreadPoolExecutor(1, initializer=lambda: torch.set_num_threads(1))
        self.index, self.next = -1, Future[T]()

    def take(self, index: int) -> T:
        """make(index), now; make(index + 1) is begun."""
        if index != self.index:
            self.next = self.thread.submit(self.make, index)
        taken = self.next.result()
        self.index, self.next = index + 1, self.thread.submit(self.make, index + 1)
        return taken
