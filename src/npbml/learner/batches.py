"""What is known of tasks before they are learned, and how functions of one task become functions of many."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from npbml.data.tasks import Task
from npbml.errors import DataError
from npbml.rule.descend import Parameters, State


class Prepared(NamedTuple):
    """The frozen work of a task, done once: stem features, targets, relation scores, random numbers."""

    inner: Tensor  # [items of the inner batch, filters, h, w], support first
    final: Tensor  # [items of the final batch, filters, h, w], query last
    labels: Tensor  # [support, outputs]: one-hot, or values
    scores: Tensor  # [query, ways], or [query, 0] where no loss asks for them
    noise: Tensor  # uniform in (0, 1), as many as the preconditioner asks for


class Frozen(NamedTuple):
    """A function of images that nothing changes, the networks it is made of, and what else it depends on."""

    of: Callable[[Tensor], Tensor]
    networks: tuple[nn.Module, ...]
    settings: tuple[float, ...] = ()


class Acts(NamedTuple):
    """What an adaptation is made of, of one task or, lifted by an engine, of many together."""

    begin: Callable[[Prepared], State]
    advance: Callable[..., State]  # state, prepared, step, order, norm_step -> state
    score: Callable[[Parameters, Prepared, Tensor, int], Tensor]  # theta, prepared, query labels, step -> loss


def stack_tasks(tasks: Sequence[Task]) -> Task:
    """Tasks of equal size as one batched task."""
    try:
        return Task(*(torch.stack(parts) for parts in zip(*tasks, strict=True)))
    except RuntimeError as error:
        raise DataError(f"Tasks that run together must have the same size: {error}") from None


def one_by_one(function: Callable[..., Any], *batched: Any) -> Any:
    return stacked([function(*task) for task in split(batched)])


def split(batched: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """A tree of tensors with a leading tasks dimension as one tree for each task."""
    count = len(tree_leaves(batched)[0])
    return [tree_map(lambda tensor, i=index: tensor[i], batched) for index in range(count)]


def stacked(results: list[Any]) -> Any:
    return tree_map(lambda *tensors: torch.stack(tensors), *results)
