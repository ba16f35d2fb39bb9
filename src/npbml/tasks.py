"""A few-shot task: labelled support items, and query items to be predicted."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from npbml.errors import DataError


class Task(NamedTuple):
    """Support and query of one task, each sorted by class.

    support_images [ways * shots, channels, height, width], support_labels [ways * shots], query_images [ways
    * queries, channels, height, width], query_labels [ways * queries]. Images are bytes, or floats in 0 to 1.
    Labels are 0 to ways - 1, in the random order in which the classes were drawn. A batch of tasks is the same
    with a dimension of tasks before every other.
    """

    support_images: Tensor
    support_labels: Tensor
    query_images: Tensor
    query_labels: Tensor


def stack_tasks(tasks: Sequence[Task]) -> Task:
    """Tasks of equal size as one batch of tasks."""
    if not tasks:
        raise DataError("There are no tasks.")
    try:
        return Task(*(torch.stack(parts) for parts in zip(*tasks, strict=True)))
    except RuntimeError as error:
        raise DataError(f"Tasks in one batch must have the same size: {error}") from None


def unstack(batched: Any) -> list[Any]:
    """A tree of tensors with a leading tasks dimension as one tree for each task."""
    count = len(tree_leaves(batched)[0])
    return [tree_map(lambda tensor, i=index: tensor[i], batched) for index in range(count)]


def restack(results: Sequence[Any]) -> Any:
    """Trees of tensors, one for each task, as one tree with a leading tasks dimension."""
    return tree_map(lambda *tensors: torch.stack(tensors), *results)
