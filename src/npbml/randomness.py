"""Explicit randomness: every draw comes from a generator named by a seed and what the draw is for.

Draws that are large, or that a GPU records, are counters scattered from one number: whole numbers are computed
alike everywhere, so that every device draws the same, at its own speed, and asks nothing of the host.
"""

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A CPU generator fixed by `seed` and `purpose`, such as `generator(0, "train", step)`.

    Because a draw is named by its step rather than by what was drawn before it, a resumed run sees the same
    tasks as one that was never stopped, and the same numbers are drawn whatever device computes with them.
    """
    name = repr((int(seed), *purpose)).encode()
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name).digest()[:8], "big") >> 1)


@contextmanager
def own_random_state(seed: int) -> Iterator[None]:
    """Have torch's global CPU generator begin at `seed` for a block, and be as it was afterwards.

    Modules of torch draw their first weights from it when they are made.
    """
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)


def draw_numbers(generator: torch.Generator, count: int = 1) -> Tensor:
    """Numbers to scatter draws from, int64 [count]."""
    return torch.stack([torch.randint(-(2**62), 2**62, (), generator=generator) for _ in range(count)])


def keys(number: Tensor, *shape: int) -> Tensor:
    """Random whole numbers, int64 [*shape], none negative; two that are equal do not occur in practice."""
    return scattered(counter(math.prod(shape), number.device) + number).view(shape)


def uniform(number: Tensor, *shape: int) -> Tensor:
    """Random numbers in [0, 1), float64 [*shape]."""
    return (keys(number, *shape) >> 10).double() * 2.0**-53


def counter(count: int, device: torch.device) -> Tensor:
    """That of splitmix64, int64 [count]."""
    return torch.arange(1, count + 1, device=device) * _signed(0x9E3779B97F4A7C15)


def scattered(z: Tensor) -> Tensor:
    """The mixing of splitmix64, less the lowest bit: int64, none negative."""
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return _shift(z ^ _shift(z, 31), 1)


def _shift(z: Tensor, bits: int) -> Tensor:
    """To the right, with zeros coming in, which int64 does not do by itself."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """64 bits as int64 has them."""
    return word - (1 << 64) if word >> 63 else word
