"""Nearest class means and soft k-means on tasks of any shape."""

import pytest
import torch
from torch import Tensor

from npbml.engine.baselines import GRID, PROTOTYPES, FixedMeans, item_angles, mean_logits
from npbml.errors import DataError
from npbml.randomness import generator
from npbml.rule.loss import one_hot
from npbml.scorers.settings import ScorerSettings
from npbml.scorers.soft_kmeans import SoftKMeans


def items(count: int, ways: int = 3) -> tuple[Tensor, Tensor]:
    random = generator(0, "items")
    labels = torch.arange(ways).repeat(2)
    centres = torch.randn(ways, 6, generator=random, dtype=torch.float64)
    names = torch.cat([labels, torch.arange(count) % ways])
    return centres[names] + 0.4 * torch.randn(len(names), 6, generator=random, dtype=torch.float64), labels


@pytest.mark.parametrize("angles", ["plain", "centred", "whitened"])
@pytest.mark.parametrize("rounds", [0, 3])
def test_they_are_the_scores_of_soft_k_means(angles: str, rounds: int) -> None:
    every, labels = items(9)
    how = FixedMeans(7.0, rounds, angles)
    logits = mean_logits(item_angles(every, 15, angles), one_hot(labels, 3, torch.float64), 9, how)
    settings = ScorerSettings(
        temperature=7.0, rounds=rounds, centre=angles != "plain", whiten=angles == "whitened"
    )
    scores = SoftKMeans(3, settings)(every[:6], labels, every[6:], 3)
    torch.testing.assert_close(logits.softmax(-1), scores, rtol=0, atol=1e-12)


@pytest.mark.parametrize("how", [PROTOTYPES, *(how for how in GRID if how.angles != "whitened")][:8])
def test_a_query_beside_the_pool_changes_no_other_answer(how: FixedMeans) -> None:
    every, labels = items(9)
    members, pool = one_hot(labels, 3, torch.float64), 5

    def logits(rows: Tensor) -> Tensor:
        return mean_logits(item_angles(rows, 6 + pool, how.angles), members, pool, how)

    whole = logits(every)
    torch.testing.assert_close(logits(every[:11]), whole[:pool], rtol=0, atol=1e-12)
    torch.testing.assert_close(logits(torch.cat([every[:11], every[-1:]]))[-1], whole[-1], rtol=0, atol=1e-12)


def test_whitening_needs_all_items_in_the_pool() -> None:
    with pytest.raises(DataError, match="beside the pool"):
        item_angles(items(4)[0], 8, "whitened")
