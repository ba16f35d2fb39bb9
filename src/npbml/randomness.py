"""Explicit randomness: every draw comes from a generator named by a seed and what the draw is for."""

import hashlib

import torch


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A CPU generator fixed by `seed` and `purpose`, such as `generator(0, "train", step)`.

    Because a draw is named by its step rather than by what was drawn before it, a resumed run sees the same
    tasks as one that was never stopped, and the same numbers are drawn whatever device computes with them.
    """
    name = repr((int(seed), *purpose)).encode()
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name).digest()[:8], "big") >> 1)
