"""Tasks of any shape: support, pool and queries are disjoint, and counts are those of the shape."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from npbml.data.draws import check_shape, draw_tasks, fitting_shapes, task_items
from npbml.data.tasks import ClassSet
from npbml.errors import DataError
from npbml.randomness import generator
from npbml.shapes import Shape, read_shape, read_shapes


def class_set(counts: list[int]) -> ClassSet:
    starts = torch.tensor([sum(counts[:i]) for i in range(len(counts))])
    images = torch.zeros(sum(counts), 1, 2, 2, dtype=torch.uint8)
    names = tuple(map(str, range(len(counts))))
    return ClassSet(images, starts, torch.tensor(counts), names, torch.zeros(1), torch.ones(1))


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], Shape, int]:
    ways, shots = draw(st.integers(2, 5)), draw(st.integers(1, 3))
    unequal_shots, unequal_pool = draw(st.booleans()), draw(st.booleans())
    pool = draw(st.integers(0, 12)) if unequal_pool else ways * draw(st.integers(0, 3))
    queries = draw(st.integers(0 if pool else 1, 3))
    shape = Shape(ways, shots, pool, queries, unequal_shots, unequal_pool)
    least = -(-(shape.support + shape.scored) // ways) + shots
    counts = draw(st.lists(st.integers(least, least + 6), min_size=ways, max_size=8))
    return counts, shape, draw(st.integers(0, 2**40))


@given(cases())
def test_every_task_has_the_shape(case: tuple[list[int], Shape, int]) -> None:
    counts, shape, seed = case
    classes, tasks = class_set(counts), 3
    if shape not in fitting_shapes(classes, [shape]):
        with pytest.raises(DataError):
            check_shape(classes, shape)
        return
    drawn = draw_tasks(classes, shape, tasks, generator(seed))
    support, labels, query, query_labels = task_items(shape, drawn)
    assert support.shape == labels.shape == (tasks, shape.support)
    assert query.shape == query_labels.shape == (tasks, shape.scored)
    for row in range(tasks):
        every = torch.cat([support[row], query[row]])
        assert len(every.unique()) == len(every)  # no image twice
        names = torch.cat([labels[row], query_labels[row]])
        true = classes.labels[every]
        of_label = [true[names == label].unique() for label in range(shape.ways)]
        assert all(len(found) == 1 for found in of_label)  # one class a label
        assert len(torch.cat(of_label).unique()) == shape.ways  # another for every label
        labelled = labels[row].bincount(minlength=shape.ways)
        assert labelled.min() >= 1 if shape.unequal_shots else (labelled == shape.shots).all()
        pool = query_labels[row][: shape.pool].bincount(minlength=shape.ways)
        assert shape.unequal_pool or (pool == shape.pool // shape.ways).all()
        beside = query_labels[row][shape.pool :].bincount(minlength=shape.ways)
        assert (beside == shape.queries).all()


def test_proportions_are_those_of_dirichlet() -> None:
    """Dirichlet(2, 2): a share has the mean 1/2 and the variance 1/20; a count of n draws adds its own."""
    classes, pool = class_set([120, 120]), 60
    shape = Shape(2, 1, pool, unequal_pool=True)
    _, _, _, labels = task_items(shape, draw_tasks(classes, shape, 20_000, generator(0, "dirichlet")))
    shares = (labels == 0).double().mean(1)
    variance = 1 / 20 + (1 / 4 - 1 / 20) / pool
    assert abs(shares.mean() - 1 / 2) < 4 * (variance / 20_000) ** 0.5
    assert shares.var() / variance == pytest.approx(1, rel=0.03)


def test_numbers_of_shots_differ_and_sum_up() -> None:
    classes, shape = class_set([40] * 5), read_shape("5x~3")
    _, labels, _, _ = task_items(shape, draw_tasks(classes, shape, 500, generator(0, "shots")))
    counts = torch.stack([row.bincount(minlength=5) for row in labels])
    assert (counts.sum(1) == 15).all() and counts.min() == 1 and counts.max() > 6


def test_the_benchmark_draws_what_it_drew() -> None:
    """Equal shapes are the tasks of `ClassSet.draw`, number for number."""
    classes = class_set([30] * 8)
    drawn = draw_tasks(classes, read_shape("5x2+75"), 4, generator(3))
    assert torch.equal(drawn, classes.draw(4, 5, 2, 15, generator(3)))
    (support, own, query, others), (one, other) = task_items(read_shape("5x2+75"), drawn), classes.items(drawn, 2)
    assert torch.equal(support, one) and torch.equal(query, other)
    assert torch.equal(torch.stack([own[0].sum(), others[0].sum()]), torch.tensor([20, 150]))


@pytest.mark.parametrize("text", ["9x1", "5x20", "5x1+300", "5x1+~300"])
def test_a_shape_that_classes_cannot_fill_is_refused(text: str) -> None:
    classes = class_set([30] * 8)
    with pytest.raises(DataError, match=r"9 classes|too few"):
        draw_tasks(classes, read_shape(text), 1, generator(0))
    assert fitting_shapes(classes, read_shapes([text, "5x1"])) == [read_shape("5x1")]
