"""Tasks of any shape drawn from classes: which images, and how many of each class.

What is drawn is one tensor of whole numbers, [tasks, ways, columns]. The columns of a class are its images: first
the labelled ones, then those of the pool, then the queries beside it. Where the numbers differ between classes,
two more columns say how many are labelled, and how many are in the pool.
"""

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from npbml.data.tasks import ClassSet
from npbml.errors import DataError
from npbml.randomness import draw_numbers, uniform
from npbml.shapes import DIRICHLET, Shape


class TaskItems(NamedTuple):
    """The images of tasks and their labels, each [tasks, items]; queries are the pool and those beside it."""

    support: Tensor
    support_labels: Tensor
    query: Tensor
    query_labels: Tensor


def draw_tasks(classes: ClassSet, shape: Shape, tasks: int, generator: torch.Generator) -> Tensor:
    """What `tasks` tasks of a shape are made of, [tasks, ways, columns], where the images are."""
    check_shape(classes, shape)
    numbers = draw_numbers(generator, numbers_for(shape)).to(classes.images.device)
    return draw_tasks_from(classes, shape, numbers, tasks)


def numbers_for(shape: Shape) -> int:
    """How many numbers `draw_tasks_from` takes: for the classes, for their images, and for unequal counts."""
    return 2 if shape.equal else 3


def draw_tasks_from(classes: ClassSet, shape: Shape, numbers: Tensor, tasks: int) -> Tensor:
    """`draw_tasks`, from numbers that are where the images are: nothing is asked of the host."""
    images = min(shape.images, int(classes.counts.max()))
    drawn = classes.draw_from(numbers, tasks, shape.ways, images)
    if shape.equal:
        return drawn
    labelled, pool = _counts(classes, shape, numbers[2], tasks)
    return torch.cat([drawn, labelled[..., None], pool[..., None]], -1)


def _counts(classes: ClassSet, shape: Shape, number: Tensor, tasks: int) -> tuple[Tensor, Tensor]:
    """How many items of each class are labelled, and how many are in the pool: [tasks, ways] each."""
    ways, spare, fewest = shape.ways, shape.support - shape.ways, int(classes.counts.min())
    sizes = [DIRICHLET * ways] * 2 + [spare, shape.pool]
    of_support, of_pool, support_draws, pool_draws = uniform(number, tasks, sum(sizes)).split(sizes, 1)
    equal = torch.ones(tasks, ways, dtype=torch.long, device=number.device)
    labelled, pool = shape.shots * equal, shape.pool // ways * equal
    if shape.unequal_shots:
        drawn = 1 + _multinomial(_proportions(of_support, ways), support_draws)
        labelled = _at_most(drawn, most_labelled(shape, fewest) * equal)
    if shape.unequal_pool:
        drawn = _multinomial(_proportions(of_pool, ways), pool_draws)
        pool = _at_most(drawn, fewest - shape.queries - labelled)
    return labelled, pool


def most_labelled(shape: Shape, fewest: int) -> int:
    """The most labelled items of a class: its other images leave room for a pool."""
    if not shape.unequal_shots:
        return shape.shots
    pool = 0 if shape.unequal_pool else shape.pool // shape.ways
    return min(shape.support - shape.ways + 1, max(shape.shots, (fewest - shape.queries - pool) // 2))


def _at_most(counts: Tensor, room: Tensor) -> Tensor:
    """Counts [tasks, ways] that exceed no class's room: what is too much goes to others, one after another."""
    missing = (counts - room).clamp(min=0).sum(1, keepdim=True)
    counts = torch.minimum(counts, room)
    free = room - counts
    return counts + (missing - (free.cumsum(1) - free)).clamp(min=0).minimum(free)


def _proportions(numbers: Tensor, ways: int) -> Tensor:
    """Proportions from Dirichlet(2, ..., 2), [tasks, ways]: a gamma variable of 2 is a sum of two exponentials."""
    gammas = -(1 - numbers).log().unflatten(1, (DIRICHLET, ways)).sum(1)
    return gammas / gammas.sum(1, keepdim=True)


def _multinomial(proportions: Tensor, numbers: Tensor) -> Tensor:
    """How many of `numbers` [tasks, draws], uniform in [0, 1), fall to each class: [tasks, ways]."""
    ways = proportions.shape[1]
    bounds = proportions.cumsum(1)[:, :-1].contiguous()
    drawn = torch.searchsorted(bounds, numbers.contiguous(), right=True)
    return (drawn[..., None] == torch.arange(ways, device=drawn.device)).sum(1)


def task_items(shape: Shape, drawn: Tensor) -> TaskItems:
    """The images and labels of what was drawn, sorted by class; the pool stands before the queries beside it."""
    tasks, ways, _ = drawn.shape
    if shape.equal:
        equal = torch.ones(tasks, ways, dtype=torch.long, device=drawn.device)
        labelled, pool = shape.shots * equal, shape.pool // ways * equal
    else:
        labelled, pool = drawn[..., -2], drawn[..., -1]
    beside = torch.full_like(pool, shape.queries)
    support = _taken(drawn, labelled, torch.zeros_like(labelled), shape.support)
    in_pool = _taken(drawn, pool, labelled, shape.pool)
    others = _taken(drawn, beside, labelled + pool, ways * shape.queries)
    query = (torch.cat(pair, 1) for pair in zip(in_pool, others, strict=True))
    return TaskItems(*support, *query)


def _taken(drawn: Tensor, counts: Tensor, first: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """`counts` images of each class, from column `first` on, and their labels: [tasks, total] each."""
    ends = counts.cumsum(1)
    places = torch.arange(total, device=drawn.device).expand(len(drawn), total).contiguous()
    labels = torch.searchsorted(ends, places, right=True)
    column = places - (ends - counts).gather(1, labels) + first.gather(1, labels)
    rows = drawn.gather(1, labels[..., None].expand(-1, -1, drawn.shape[2]))
    return rows.gather(2, column[..., None]).squeeze(2), labels


def fitting_shapes(classes: ClassSet, shapes: Sequence[Shape]) -> list[Shape]:
    """Those of the shapes that these classes can fill."""
    found = []
    for shape in shapes:
        with contextlib.suppress(DataError):
            check_shape(classes, shape)
            found.append(shape)
    return found


def check_shape(classes: ClassSet, shape: Shape) -> None:
    """Refuse a shape that these classes cannot fill."""
    if shape.ways > len(classes):
        raise DataError(
            f"Tasks of the shape {shape} have {shape.ways} classes, and there are only {len(classes)}."
        )
    fewest, equal_pool = int(classes.counts.min()), 0 if shape.unequal_pool else shape.pool // shape.ways
    each = most_labelled(shape, fewest) + shape.queries + equal_pool
    if fewest < each or shape.ways * fewest < shape.support + shape.scored:
        name = classes.names[int(classes.counts.argmin())]
        raise DataError(
            f"Class {name!r} has {fewest} images, which is too few for tasks of the shape {shape}: use fewer "
            "shots, queries or unlabelled items, or add images."
        )
