"""A few-shot task: labelled support items, unlabelled items, and query items to be predicted."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from npbml.errors import DataError


class Task(NamedTuple):
    """Support S, query Q and the pool U of unlabelled items of one task.

    support_images [support, channels, height, width], support_labels [support], query_images [query, channels,
    height, width], query_labels [query]. Images are bytes, or floats in 0 to 1. Labels are 0 to ways - 1. A batch
    of tasks is the same with a dimension of tasks before every other.

    unlabelled_images [unlabelled, channels, height, width] are those that adaptation may look at beside the
    support; there may be none, [0, ...]. Where they are not given, they are the query images, as in the paper.
    """

    support_images: Tensor
    support_labels: Tensor
    query_images: Tensor
    query_labels: Tensor
    unlabelled_images: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> "Task":
        """The task with a function applied to each of its tensors."""
        return Task(*(None if part is None else function(part) for part in self))  # type: ignore[arg-type]


def stack_tasks(tasks: Sequence[Task]) -> Task:
    """Tasks of equal size as one batch of tasks."""
    if not tasks:
        raise DataError("There are no tasks.")
    pools = {task.unlabelled_images is None for task in tasks}
    if len(pools) > 1:
        raise DataError("Some tasks of the batch have unlabelled images of their own, and some have none given.")
    try:
        parts = [torch.stack(parts) for parts in zip(*(task[:4] for task in tasks), strict=True)]
        pool = [task.unlabelled_images for task in tasks if task.unlabelled_images is not None]
        return Task(*parts, torch.stack(pool) if pool else None)  # type: ignore[call-arg]
    except RuntimeError as error:
        raise DataError(f"Tasks in one batch must have the same size: {error}") from None


def split_batch(batch: Task) -> list[Task]:
    """A batch of tasks as one task each."""
    return [batch.map(lambda part, i=index: part[i]) for index in range(len(batch.support_labels))]  # type: ignore[misc]


def unstack(batched: Any) -> list[Any]:
    """A tree of tensors with a leading tasks dimension as one tree for each task."""
    count = len(tree_leaves(batched)[0])
    return [tree_map(lambda tensor, i=index: tensor[i], batched) for index in range(count)]


def restack(results: Sequence[Any]) -> Any:
    """Trees of tensors, one for each task, as one tree with a leading tasks dimension."""
    return tree_map(lambda *tensors: torch.stack(tensors), *results)
