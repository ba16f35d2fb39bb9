"""Law C28: relation scores follow the classes and do not see the order of the shots."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from npbml.data.tasks import Task
from npbml.nets.relation import PrototypeScores, RelationNetwork, RelationSettings, evened, root
from npbml.randomness import generator


def make_relation(**changes: Any) -> RelationNetwork:
    network = RelationNetwork(2, RelationSettings(**{"widths": (3, 4), "pools": 1, **changes})).double()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator(0, name), dtype=torch.float64)
            parameter.add_(0.3 * noise)
    return network


def same(images: Tensor) -> Tensor:
    return images


def scores(network: RelationNetwork | PrototypeScores, task: Task, **changes: Tensor) -> Tensor:
    task = task._replace(**changes)
    seen = [task.support_images, task.query_images]
    if isinstance(network, PrototypeScores):
        seen = [network.embed([images], same) for images in seen]
    return network(seen[0], task.support_labels, seen[1], 3).detach()


@pytest.mark.parametrize("combine", ["sum", "mean"])
def test_c28_permuted_classes_permute_the_columns(make_task: Callable[..., Task], combine: str) -> None:
    network, task, permutation = make_relation(combine=combine), make_task(), torch.tensor([2, 0, 1])
    usual = scores(network, task)
    other = scores(network, task, support_labels=permutation[task.support_labels])
    assert usual.shape == (6, 3) and usual.std(1).max() > 1e-3
    torch.testing.assert_close(other[:, permutation], usual, rtol=0, atol=1e-10)


@pytest.mark.parametrize("combine", ["sum", "mean"])
def test_c28_permuted_shots_change_nothing(make_task: Callable[..., Task], combine: str) -> None:
    network, task, order = make_relation(combine=combine), make_task(), torch.tensor([4, 1, 3, 5, 0, 2])
    other = scores(
        network,
        task,
        support_images=task.support_images[order],
        support_labels=task.support_labels[order],
    )
    torch.testing.assert_close(other, scores(network, task), rtol=0, atol=1e-10)


def test_c28_permuted_queries_permute_the_rows(make_task: Callable[..., Task]) -> None:
    network, task, order = make_relation(), make_task(), torch.tensor([4, 1, 3, 5, 0, 2])
    other = scores(network, task, query_images=task.query_images[order])
    torch.testing.assert_close(other, scores(network, task)[order], rtol=0, atol=1e-10)


def test_c28_scores_lie_between_0_and_1_whatever_the_weights(make_task: Callable[..., Task]) -> None:
    network, task, ends = make_relation(), make_task(), []
    for factor in (1e4, -1.0):
        with torch.no_grad():
            network.score.weight.mul_(factor)
        values = scores(network, task)
        assert values.min() >= 0 and values.max() <= 1
        ends += [values.min().item(), values.max().item()]
    assert min(ends) == 0 and max(ends) == 1


def test_a_class_map_is_the_sum_or_the_mean_of_its_shots(make_task: Callable[..., Task]) -> None:
    """The scores, pair by pair, of [class map, query map] through the relation module."""
    task = make_task()
    for combine in ("sum", "mean"):
        network = make_relation(combine=combine)
        maps = network.encoder(torch.cat([task.support_images, task.query_images]))
        pairs = []
        for query in range(6):
            for way in range(3):
                shots = maps[:6][task.support_labels == way]
                pairs.append(torch.cat([getattr(shots, combine)(0), maps[6 + query]]))
        pooled = network.relation(torch.stack(pairs)).mean((2, 3))
        expected = torch.sigmoid(network.score(pooled)).view(6, 3)
        torch.testing.assert_close(scores(network, task), expected.detach(), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("size", "expected"), [(84, 21), (32, 8), (28, 7)])
def test_the_encoder_pools_in_two_blocks_only(size: int, expected: int) -> None:
    network = RelationNetwork(3, RelationSettings(widths=(2, 2, 2, 3)))
    images = torch.randn(2, 3, size, size)
    assert network.encoder(images).shape == (2, 3, expected, expected)
    assert network(images, torch.tensor([0, 1]), images, 2).shape == (2, 2)


class Means(torch.nn.Module):
    """The embedding is the mean over space of each channel, shifted."""

    def forward(self, images: Tensor) -> Tensor:
        return images.mean((2, 3)) + torch.tensor([0.3, -0.2], dtype=images.dtype)


def make_prototypes(**settings: Any) -> PrototypeScores:
    return PrototypeScores(Means(), None, RelationSettings(**settings))


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
    found = scores(make_prototypes(temperature=4.0, centred=True), task)
    every = make_prototypes().embed([torch.cat([task.support_images, task.query_images])], same)
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
        support, query = (
            network.embed([images * size for size in views], same)
            for images in (task.support_images, task.query_images)
        )
        return network(support, task.support_labels, query, 3).log()

    mean = (logits(1.0) + logits(-3.0)) / 2
    torch.testing.assert_close(logits(1.0, -3.0), mean.log_softmax(1), rtol=0, atol=1e-12)


def test_two_networks_stand_side_by_side_and_the_learners_own_begins_with_its_stem() -> None:
    images = torch.randn(5, 2, 4, 4, generator=generator(0, "images"), dtype=torch.float64)

    def stem(view: Tensor) -> Tensor:
        return view.square()

    views = [images, images.flip(2) + 1.0]
    found = PrototypeScores(Means(), Means(), RelationSettings(kind="both")).embed(views, stem)
    parts = [Means()(view) for view in (*views, *map(stem, views))]
    expected = torch.cat([part / part.norm(dim=1, keepdim=True) for part in parts], 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("enlarged", "side"), [(1.0, 10), (1.2, 12), (1.25, 12), (2.0, 20)])
def test_views_are_of_enlarged_images(enlarged: float, side: int) -> None:
    images = torch.arange(10.0).expand(2, 3, 10, 10)
    views = PrototypeScores(None, Means(), RelationSettings(enlarged=enlarged, turns=True)).views(images)
    assert [view.shape for view in views] == 4 * [(2, 3, side, side)]
    assert (views[0] is images) == (enlarged == 1.0)
    first = views[0]
    torch.testing.assert_close(first.mean(), torch.tensor(4.5))
    assert first[..., 0].max() == 0 and first[..., -1].min() == 9
    torch.testing.assert_close(views[2], first.flip(2, 3))


class Corner(torch.nn.Module):
    """The embedding is what stands in a corner of the image, which turns and mirrors change."""

    def forward(self, images: Tensor) -> Tensor:
        return images[:, :, 0, :2].flatten(1)


@pytest.mark.parametrize("turns", [False, True])
def test_embeddings_of_mirrored_images_join_those_of_the_same_turn(turns: bool) -> None:
    images = torch.randn(5, 2, 4, 4, generator=generator(0, "images"), dtype=torch.float64)
    scores = PrototypeScores(Corner(), Corner(), RelationSettings(kind="both", turns=turns, mirrored=True))

    def stem(view: Tensor) -> Tensor:
        return view.square()

    def unit(rows: Tensor) -> Tensor:
        return rows / rows.norm(dim=1, keepdim=True)

    parts = []
    for begin in (same, stem):
        for turn in range(4 if turns else 1):
            both = [Corner()(begin(seen.rot90(turn, (2, 3)))) for seen in (images, images.flip(3))]
            parts.append(unit(unit(both[0]) + unit(both[1])))
    found = scores.embed(scores.views(images), stem)
    torch.testing.assert_close(found, torch.cat(parts, 1), rtol=0, atol=1e-12)
    torch.testing.assert_close(scores.embed(scores.views(images.flip(3)), stem), found, rtol=0, atol=1e-12)


def test_items_are_evened_by_the_fourth_root_of_their_covariance() -> None:
    items = torch.randn(12, 30, generator=generator(0, "items"), dtype=torch.float64)
    items[:, :3] *= 20.0  # most of it lies in a few directions
    items = items - items.mean(0)
    left, values, right = torch.linalg.svd(items, full_matrices=False)
    expected = left * values.sqrt() @ right
    found = evened(items)
    torch.testing.assert_close(found @ found.T, expected @ expected.T, rtol=0, atol=2e-3 * values[0].item())
    assert evened(items.float()).dtype == torch.float32


@pytest.mark.parametrize("rank", [1, 5, 40])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_the_root_of_a_matrix_is_that_by_eigenvalues(rank: int, size: float) -> None:
    factor = torch.randn(20, rank, generator=generator(0, "root"), dtype=torch.float64)
    matrix = size * factor @ factor.T
    values, vectors = torch.linalg.eigh(matrix + 1e-5 * matrix.norm() * torch.eye(20, dtype=torch.float64))
    expected = vectors * values.sqrt() @ vectors.T
    torch.testing.assert_close(root(matrix), expected, rtol=0, atol=1e-8 * expected.norm().item())


@pytest.mark.parametrize(
    "settings",
    [{}, {"rounds": 2}, {"rounds": 2, "centred": True}, {"rounds": 2, "centred": True, "evened": True}],
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
