"""A tiny learner of npbml-any, and pictures of three kinds that it can tell apart."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from npbml.learner.learner import Learner
from npbml.methods import find_recipe

Pictures = Callable[..., np.ndarray]


@pytest.fixture
def learner(make_learner: Callable[..., Learner]) -> Learner:
    """A learner of npbml-any, on three channels, with random weights."""
    rule: dict[str, Any] = dict(find_recipe("npbml-any").rule)
    return make_learner(channels=3, **{**rule, "net": {**rule["net"], "filters": 6}}).float()


@pytest.fixture
def pictures() -> Pictures:
    """pictures(count, seed=...) -> random bytes [count, 20, 20, 3]"""

    def make(count: int, seed: int = 0) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, 256, (count, 20, 20, 3), dtype=np.uint8)

    return make


@pytest.fixture
def colours() -> Callable[..., tuple[np.ndarray, list[str]]]:
    """colours(each, seed=...) -> noisy pictures of three colours, each so many times, and their labels"""

    def make(each: int, seed: int = 0) -> tuple[np.ndarray, list[str]]:
        random = np.random.default_rng(seed)
        base = 200 * np.eye(3)[:, None, None, None, :] + random.normal(0, 15, (3, each, 20, 20, 3)) + 20
        names = ["red", "green", "blue"]
        return base.clip(0, 255).astype(np.uint8).reshape(-1, 20, 20, 3), list(np.repeat(names, each))

    return make
