"""Law C28 of scores by angles between embeddings, and what they are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from npbml.randomness import generator
from npbml.scorers.settings import ScorerSettings
from npbml.scorers.soft_kmeans import SoftKMeans
from npbml.tasks import Task


class Means(torch.nn.Module):
    """The embedding is the mean over space of each channel, shifted."""

    def forward(self, images: Tensor) -> Tensor:
        return images.mean((2, 3)) + torch.tensor([0.3, -0.2], dtype=images.dtype)


def make_prototypes(**settings: Any) -> SoftKMeans:
    return SoftKMeans(2, ScorerSettings(**settings), Means())


def same(images: Tensor) -> Tensor:
    return images


def scores(network: SoftKMeans, task: Task, **changes: Tensor) -> Tensor:
    task = task._replace(**changes)
    support, query = (network.embed(images, same) for images in (task.support_images, task.query_images))
    return network(support, task.support_labels, query, 3).detach()


def test_scores_by_prototypes_are_the_softmax_of_scaled_cosines(make_task: Callable[..., Task]) -> None:
    task, network = make_task(), make_prototypes(temperature=4.0)
    found = scores(network, task)
    for row, image in zip(found, task.query_images, strict=True):
        query = network.encoder(image[None])[0]
        cosines = []
        for label in range(3):
            shots = [network.encoder(i[None])[0] for i in task.support_images[task.support_labels == label]]
            centre = torch.stack([shot / shot.norm() for shot in shots]).mean(0)
            cosines.append((query @ centre / query.norm() / centre.norm()).item())
        expected = torch.softmax(4.0 * torch.tensor(cosines, dtype=torch.float64), 0)
        torch.testing.assert_close(row, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rounds", [1, 3])
def test_query_items_join_the_means_of_their_classes_by_their_scores(
    make_task: Callable[..., Task], rounds: int
) -> None:
    task, found = make_task(), scores(make_prototypes(temperature=4.0), make_task())

    def unit(images: Tensor) -> list[Tensor]:
        embedded = make_prototypes().encoder(images)
        return [row / row.norm() for row in embedded]

    support, query = unit(task.support_images), unit(task.query_images)
    for _ in range(rounds):
        centres = []
        for label in range(3):
            total = sum(e for e, own in zip(support, task.support_labels, strict=True) if own == label)
            total = total + sum(score * e for score, e in zip(found[:, label], query, strict=True))
            centres.append(total / total.norm())
        found = torch.stack([torch.stack([4.0 * e @ centre for centre in centres]).softmax(0) for e in query])
    network = make_prototypes(temperature=4.0, rounds=rounds)
    torch.testing.assert_close(scores(network, task), found, rtol=0, atol=1e-12)


def test_centred_scores_are_those_of_embeddings_without_what_the_task_has_in_common(
    make_task: Callable[..., Task],
) -> None:
    task = make_task()
    found = scores(make_prototypes(temperature=4.0, centre=True), task)
    every = make_prototypes().embed(torch.cat([task.support_images, task.query_images]), same)
    apart = every - every.sum(0) / len(every)
    apart = apart / apart.norm(dim=1, keepdim=True)
    support, query = apart[: len(task.support_images)], apart[len(task.support_images) :]
    centres = torch.stack([support[task.support_labels == label].mean(0) for label in range(3)])
    cosines = query @ (centres / centres.norm(dim=1, keepdim=True)).T
    torch.testing.assert_close(found, (4.0 * cosines).softmax(1), rtol=0, atol=1e-12)


def test_views_count_alike_whatever_the_length_of_their_embeddings(make_task: Callable[..., Task]) -> None:
    """At one shot, the cosine of embeddings side by side is the mean of the views' cosines."""
    task, network = make_task(shots=1), make_prototypes(temperature=1.0)

    def logits(*views: float) -> Tensor:
        network.views = lambda images: [images * size for size in views]  # type: ignore[method-assign]
        support, query = (network.embed(images, same) for images in (task.support_images, task.query_images))
        return network(support, task.support_labels, query, 3).log()

    mean = (logits(1.0) + logits(-3.0)) / 2
    torch.testing.assert_close(logits(1.0, -3.0), mean.log_softmax(1), rtol=0, atol=1e-12)


def test_two_networks_stand_side_by_side_and_the_learners_own_begins_with_its_stem() -> None:
    images = torch.randn(5, 2, 4, 4, generator=generator(0, "images"), dtype=torch.float64)

    def stem(view: Tensor) -> Tensor:
        return view.square()

    views = [images, images.flip(2) + 1.0]
    network = SoftKMeans(2, ScorerSettings(kind="both"), Means(), Means())
    network.views = lambda images: views  # type: ignore[method-assign]
    found = network.embed(images, stem)
    parts = [Means()(view) for view in (*views, *map(stem, views))]
    expected = torch.cat([part / part.norm(dim=1, keepdim=True) for part in parts], 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("enlarge", "side"), [(1.0, 10), (1.2, 12), (1.25, 12), (2.0, 20)])
def test_views_are_of_enlarged_images(enlarge: float, side: int) -> None:
    images = torch.arange(10.0).expand(2, 3, 10, 10)
    views = SoftKMeans(3, ScorerSettings(enlarge=enlarge, rotations=True), tail=Means()).views(images)
    assert [view.shape for view in views] == 4 * [(2, 3, side, side)]
    assert (views[0] is images) == (enlarge == 1.0)
    first = views[0]
    torch.testing.assert_close(first.mean(), torch.tensor(4.5))
    assert first[..., 0].max() == 0 and first[..., -1].min() == 9
    torch.testing.assert_close(views[2], first.flip(2, 3))


class Corner(torch.nn.Module):
    """The embedding is what stands in a corner of the image, which rotations and mirrors change."""

    def forward(self, images: Tensor) -> Tensor:
        return images[:, :, 0, :2].flatten(1)


@pytest.mark.parametrize("rotations", [False, True])
def test_embeddings_of_mirrored_images_join_those_of_the_same_rotation(rotations: bool) -> None:
    images = torch.randn(5, 2, 4, 4, generator=generator(0, "images"), dtype=torch.float64)
    settings = ScorerSettings(kind="both", rotations=rotations, flip=True)
    scores = SoftKMeans(2, settings, Corner(), Corner())

    def stem(view: Tensor) -> Tensor:
        return view.square()

    def unit(rows: Tensor) -> Tensor:
        return rows / rows.norm(dim=1, keepdim=True)

    parts = []
    for begin in (same, stem):
        for quarters in range(4 if rotations else 1):
            both = [Corner()(begin(seen.rot90(quarters, (2, 3)))) for seen in (images, images.flip(3))]
            parts.append(unit(unit(both[0]) + unit(both[1])))
    found = scores.embed(images, stem)
    torch.testing.assert_close(found, torch.cat(parts, 1), rtol=0, atol=1e-12)
    torch.testing.assert_close(scores.embed(images.flip(3), stem), found, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "settings",
    [{}, {"rounds": 2}, {"rounds": 2, "centre": True}, {"rounds": 2, "centre": True, "whiten": True}],
)
def test_c28_holds_for_prototypes(make_task: Callable[..., Task], settings: dict[str, Any]) -> None:
    network, task = make_prototypes(**settings), make_task()
    permutation = torch.tensor([2, 0, 1])
    usual = scores(network, task)
    other = scores(network, task, support_labels=permutation[task.support_labels])
    torch.testing.assert_close(other[:, permutation], usual, rtol=0, atol=1e-12)
    order = torch.tensor([4, 1, 3, 5, 0, 2])
    shuffled = scores(
        network,
        task,
        support_images=task.support_images[order],
        support_labels=task.support_labels[order],
    )
    torch.testing.assert_close(shuffled, usual, rtol=0, atol=1e-12)
    torch.testing.assert_close(usual.sum(1), torch.ones(6, dtype=torch.float64), rtol=0, atol=1e-12)
