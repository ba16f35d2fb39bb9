"""Law C32: support and query disjoint, class counts exact, labels uniform over permutations."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npbml.data.tasks import ClassSet, task_noise
from npbml.errors import DataError
from npbml.randomness import generator

PINNED = [[[21, 18, 19], [29, 25, 28], [34, 38, 39]], [[5, 7, 3], [26, 30, 27], [37, 35, 33]]]


def class_set(counts: list[int], channels: int = 1, size: int = 2) -> ClassSet:
    """Images whose pixels spell the image's own number in base 256, so that a picture says which it is."""
    total, place = torch.tensor(counts), torch.arange(sum(counts))
    images = torch.zeros(sum(counts), channels, size, size, dtype=torch.uint8)
    images[:, 0, 0, 0], images[:, 0, 0, 1] = place % 256, place // 256
    mean = torch.linspace(0.3, 0.6, channels)
    return ClassSet(
        images,
        total.cumsum(0) - total,
        total,
        tuple(f"class {c}" for c in range(len(counts))),
        mean,
        mean / 2,
    )


def numbers(classes: ClassSet, images: torch.Tensor) -> torch.Tensor:
    """The image numbers that images spell, in bytes or normalised."""
    pixels = images.double()
    if images.dtype != torch.uint8:
        pixels = (images * classes.std[:, None, None] + classes.mean[:, None, None]) * 255
    return (pixels[..., 0, 0, 0] + 256 * pixels[..., 0, 0, 1]).round().long()


@st.composite
def draws(draw: st.DrawFn) -> tuple[list[int], int, int, int, int, int]:
    shots, queries = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    counts = draw(st.lists(st.integers(shots + queries, shots + queries + 9), min_size=1, max_size=12))
    ways, tasks = draw(st.integers(1, len(counts))), draw(st.integers(1, 5))
    return counts, tasks, ways, shots, queries, draw(st.integers(0, 2**40))


@settings(deadline=None)
@given(draws())
def test_every_task_is_well_formed(case: tuple[list[int], int, int, int, int, int]) -> None:
    counts, tasks, ways, shots, queries, seed = case
    classes = class_set(counts)
    task = classes.sample(tasks, ways, shots, queries, generator(seed))
    normalised = classes.sample(tasks, ways, shots, queries, generator(seed), classes.batch)
    assert task.support_images.shape == (tasks, ways * shots, 1, 2, 2)
    assert task.query_images.shape == (tasks, ways * queries, 1, 2, 2)
    assert task.support_images.dtype == torch.uint8 and task.query_labels.dtype == torch.long
    assert normalised.support_images.dtype == torch.float32
    assert task.unlabelled_images is None and normalised.unlabelled_images is None
    for mine, theirs in zip(task[:4], normalised[:4], strict=True):
        shown = classes.normalise(mine) if mine.dtype == torch.uint8 else mine
        assert torch.equal(shown, theirs)
    for row in range(tasks):
        support, query = numbers(classes, task.support_images[row]), numbers(classes, task.query_images[row])
        assert len({*support.tolist(), *query.tolist()}) == ways * (shots + queries)
        assert task.support_labels[row].tolist() == [way for way in range(ways) for _ in range(shots)]
        assert task.query_labels[row].tolist() == [way for way in range(ways) for _ in range(queries)]
        # One class a label, the same in support and query, another for every label.
        true = classes.labels[support].view(ways, shots)
        assert (true == true[:, :1]).all() and len(set(true[:, 0].tolist())) == ways
        assert (classes.labels[query].view(ways, queries) == true[:, :1]).all()


def test_labels_are_uniform_over_permutations() -> None:
    classes, draws = class_set([6] * 4), 24000
    drawn = classes.labels[classes.draw(draws, 3, 1, 1, generator(0, "labels"))[..., 0]]
    code = (drawn * torch.tensor([16, 4, 1])).sum(1)
    observed = code.bincount(minlength=64)
    observed = observed[observed > 0].double()
    expected = draws / math.perm(4, 3)
    assert len(observed) == math.perm(4, 3)
    chi_squared = float(((observed - expected) ** 2 / expected).sum())
    assert chi_squared < 49.7  # the 0.999 quantile with 23 degrees of freedom


def test_images_are_uniform_in_support_and_query_whatever_the_count() -> None:
    classes, draws = class_set([4, 9]), 20000
    drawn = classes.draw(draws, 2, 1, 2, generator(0, "images"))
    for part in (drawn[..., :1], drawn[..., 1:]):
        for first, count in ((0, 4), (4, 9)):
            observed = part.flatten().bincount(minlength=13)[first : first + count].double()
            expected = draws * part.shape[-1] / count
            assert float(((observed - expected) ** 2 / expected).sum()) < 26.1  # 0.999 with 8 degrees


def test_a_generator_names_its_tasks() -> None:
    classes = class_set([20] * 9)
    again = [classes.draw(3, 5, 1, 5, generator(0, "train", step)) for step in (4, 4, 5)]
    assert torch.equal(again[0], again[1]) and not torch.equal(again[0], again[2])


def test_a_task_is_its_indices() -> None:
    classes = class_set([20] * 9, channels=3)
    indices = classes.draw(3, 5, 2, 4, generator(1))
    task, same = classes.task(indices, shots=2), classes.sample(3, 5, 2, 4, generator(1))
    for one, other in zip(task[:4], same[:4], strict=True):
        assert torch.equal(one, other)
    assert torch.equal(numbers(classes, classes.batch(indices)), indices)


def test_images_are_normalised_channel_by_channel() -> None:
    classes = class_set([3, 3], channels=3, size=5)
    images = torch.randint(0, 256, classes.images.shape, dtype=torch.uint8, generator=generator(2))
    classes = ClassSet(images, classes.starts, classes.counts, classes.names, classes.mean, classes.std)
    mean, std = classes.mean.double().view(3, 1, 1), classes.std.double().view(3, 1, 1)
    chosen = torch.tensor([[5, 0], [2, 5]])
    expected = (images[chosen].double() / 255 - mean) / std
    torch.testing.assert_close(classes.batch(chosen).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(classes.normalise(images[chosen] / 255).double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(classes.pixels(chosen), images[chosen])


def test_tasks_are_drawn_where_the_images_are() -> None:
    moved = class_set([8] * 5).to("meta")
    assert moved.images.device.type == moved.mean.device.type == moved.labels.device.type == "meta"
    assert moved.draw(2, 3, 1, 2, generator(3)).device.type == "meta"
    assert moved.sample(2, 3, 1, 2, generator(3)).query_images.device.type == "meta"


def test_what_is_drawn_is_fixed_by_whole_numbers_alone() -> None:
    """These are the tasks of every machine and device: splitmix64, from a start that torch's generator gives."""
    classes = class_set([8] * 5)
    assert classes.draw(2, 3, 1, 2, generator(3)).tolist() == PINNED
    if torch.cuda.is_available():
        assert classes.to("cuda").draw(2, 3, 1, 2, generator(3)).tolist() == PINNED


@pytest.mark.parametrize("name", ["tasks", "ways", "shots", "queries"])
@pytest.mark.parametrize("value", [0, -1])
def test_nothing_is_sampled_from_less_than_one(name: str, value: int) -> None:
    sizes = {"tasks": 1, "ways": 2, "shots": 1, "queries": 1} | {name: value}
    with pytest.raises(DataError, match=f"{name} is {value}"):
        class_set([5, 5]).sample(**sizes, generator=generator(0))


def test_too_few_classes_or_images_are_named() -> None:
    classes = class_set([9, 6, 9])
    classes.sample(1, 3, 2, 4, generator(0))
    with pytest.raises(DataError, match=r"'class 1' has 6 images.*needs 7.*2 shots \+ 5 queries"):
        classes.sample(1, 2, 2, 5, generator(0))
    with pytest.raises(DataError, match=r"4 ways.*only 3 classes"):
        classes.sample(1, 4, 1, 1, generator(0))


@pytest.mark.parametrize(("channels", "size"), [(1, 6), (3, 6), (1, 3), (3, 9)])
def test_classes_are_shown_as_another_learner_expects(channels: int, size: int) -> None:
    """A flat picture stays flat, a grey one keeps its level, and only size and channels change."""
    one = class_set([4, 4])
    flat = torch.arange(8, dtype=torch.uint8)[:, None, None, None].expand(8, 3, 6, 6) * 30
    shown = dataclasses.replace(one, images=flat).shown_as(channels, size)
    assert shown.images.shape == (8, channels, size, size) and shown.images.dtype == torch.uint8
    assert torch.equal(shown.images, flat[:, :1, :1, :1].expand(8, channels, size, size))
    assert torch.equal(shown.starts, one.starts) and shown.names == one.names


def test_colours_become_grey_by_their_luma() -> None:
    one = class_set([4, 4])
    colours = torch.tensor([[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255]] * 2, dtype=torch.uint8)
    images = colours[:, :, None, None].expand(8, 3, 5, 5)
    shown = dataclasses.replace(one, images=images).shown_as(1, 5)
    assert shown.images[:4, 0, 0, 0].tolist() == [76, 150, 29, 255]


def test_the_noise_of_a_task_is_uniform_and_fixed_by_its_images() -> None:
    indices = torch.randint(0, 10_000, (500, 5, 16), generator=generator(0, "noise"))
    noise = task_noise(indices, 40)
    assert noise.shape == (500, 40) and noise.dtype == torch.float32
    assert noise.min() > 0 and noise.max() < 1 and len(noise.unique()) > 19_900
    assert torch.equal(task_noise(indices[7:9], 40), noise[7:9]) and torch.equal(
        task_noise(indices, 9), noise[:, :9]
    )
    counts = torch.histc(noise, 20, 0, 1)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 43.8  # chi-square with 19 degrees of freedom, p = 0.001
    moved = indices.clone()
    moved[:, 2, 3] += 1
    assert (task_noise(moved, 40) != noise).all(1).all()
    swapped = indices.flip(1)
    assert (task_noise(swapped, 40) != noise).any(1).all()
    assert task_noise(indices, 0).shape == (500, 0)


def test_rotated_images_are_classes_of_their_own() -> None:
    classes = class_set([3, 4])
    rotated = classes.with_rotations()
    assert len(rotated) == 8 and rotated.counts.tolist() == [3, 4] * 4 and len(set(rotated.names)) == 8
    assert torch.equal(rotated.images[:7], classes.images)
    for quarter in range(4):
        for label in range(2):
            start, count = int(rotated.starts[2 * quarter + label]), int(classes.counts[label])
            own = classes.images[int(classes.starts[label]) :][:count]
            assert torch.equal(rotated.images[start : start + count], own.rot90(quarter, (-2, -1)))
