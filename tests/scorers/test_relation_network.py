"""Law C28: relation scores follow the classes and do not see the order of the shots."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from npbml.randomness import generator
from npbml.scorers.relation_network import RelationNetwork
from npbml.scorers.settings import ScorerSettings
from npbml.tasks import Task


def make_relation(**changes: Any) -> RelationNetwork:
    network = RelationNetwork(2, ScorerSettings(**{"widths": (3, 4), "pools": 1, **changes})).double()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator(0, name), dtype=torch.float64)
            parameter.add_(0.3 * noise)
    return network


def scores(network: RelationNetwork, task: Task, **changes: Tensor) -> Tensor:
    task = task._replace(**changes)
    return network(task.support_images, task.support_labels, task.query_images, 3).detach()


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
    network = RelationNetwork(3, ScorerSettings(widths=(2, 2, 2, 3)))
    images = torch.randn(2, 3, size, size)
    assert network.encoder(images).shape == (2, 3, expected, expected)
    assert network(images, torch.tensor([0, 1]), images, 2).shape == (2, 2)
