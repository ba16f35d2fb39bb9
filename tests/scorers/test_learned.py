"""Soft k-means whose numbers are learned: laws N4 and N5 of docs/laws.md, and what a gradient reaches."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from npbml.randomness import generator
from npbml.scorers.learned import SPEED, LearnedSoftKMeans
from npbml.scorers.settings import ScorerSettings
from npbml.scorers.soft_kmeans import SoftKMeans

PLAIN, CENTRED, WHITENED = range(3)


def items(seed: int = 0, ways: int = 4, shots: int = 2, pool: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    random = generator(seed, "items")
    centres = torch.randn(ways, 7, generator=random, dtype=torch.float64)
    labels = torch.arange(ways).repeat_interleave(shots)
    support = centres[labels] + 0.5 * torch.randn(len(labels), 7, generator=random, dtype=torch.float64)
    owners = torch.arange(pool) % ways
    unlabelled = centres[owners] + 0.5 * torch.randn(pool, 7, generator=random, dtype=torch.float64)
    return support, labels, unlabelled


def learned(angles: int | None = None, **settings: Any) -> LearnedSoftKMeans:
    scorer = LearnedSoftKMeans(3, ScorerSettings(**settings, whiten=True)).double()
    if angles is not None:
        with torch.no_grad():
            scorer.mixture[angles] = 100.0
    return scorer


def shaken(scorer: LearnedSoftKMeans) -> LearnedSoftKMeans:
    with torch.no_grad():
        for name, parameter in scorer.named_parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=generator(0, name), dtype=parameter.dtype)
    return scorer


@pytest.mark.parametrize("angles", [PLAIN, CENTRED, WHITENED])
@pytest.mark.parametrize("rounds", [0, 1, 10])
def test_n5_with_the_fixed_values_it_is_soft_k_means(angles: int, rounds: int) -> None:
    settings: dict[str, Any] = {"temperature": 7.0, "rounds": rounds}
    fixed = SoftKMeans(3, ScorerSettings(**settings, centre=angles >= CENTRED, whiten=angles == WHITENED))
    support, labels, pool = items()
    found = learned(angles, **settings)(support, labels, pool, 4)
    torch.testing.assert_close(found, fixed(support, labels, pool, 4), rtol=0, atol=1e-12)


@pytest.mark.parametrize("rounds", [0, 3])
def test_n4_a_class_that_is_far_away_leaves_the_odds_of_the_others(rounds: int) -> None:
    """The farther, in units of the temperature, the less: the bound is exp(-tau gap), summed over the pool."""
    support, labels, pool = items(pool=20)
    support, pool = support.abs(), pool.abs()  # in one half of the space, so that there is a far side
    far = -support.mean(0, keepdim=True)
    changes = []
    for temperature in (2.0, 8.0, 32.0):
        scorer = learned(PLAIN, temperature=temperature, rounds=rounds)
        before = scorer(support, labels, pool, 4)
        after = scorer(torch.cat([support, far]), torch.cat([labels, torch.tensor([4])]), pool, 5)
        odds = [(scores[:, 1:4] / scores[:, :1]).log() for scores in (before, after)]
        changes.append((odds[0] - odds[1]).abs().max().item())
        assert changes[-1] <= 20 * temperature * math.exp(-temperature)
    assert changes[-1] < 1e-9


def test_every_number_learns() -> None:
    scorer, (support, labels, pool) = shaken(learned(temperature=5.0, rounds=2)), items()
    scorer(support, labels, pool, 4)[:, 0].log().sum().backward()
    for name, parameter in scorer.named_parameters():
        gradient = parameter.grad
        assert gradient is not None and gradient.isfinite().all(), name
        assert gradient.flatten(1).abs().sum(1).min() > 0 if gradient.dim() > 1 else gradient.abs().max() > 0, name


def test_numbers_out_of_all_bounds_give_scores() -> None:
    support, labels, pool = items()
    for value in (-1e4, 1e4):
        scorer = learned(rounds=3)
        with torch.no_grad():
            for parameter in scorer.parameters():
                parameter.fill_(value)
        scores = scorer(support, labels, pool, 4)
        assert scores.isfinite().all()
        torch.testing.assert_close(scores.sum(-1), torch.ones(12, dtype=torch.float64))


def test_equal_items_give_scores() -> None:
    ones = torch.ones(6, 7, dtype=torch.float64)
    scores = learned(rounds=3)(ones[:4], torch.arange(4), ones, 4)
    torch.testing.assert_close(scores, torch.full((6, 4), 0.25, dtype=torch.float64))


def test_b_pulls_towards_balance_or_follows_the_pool() -> None:
    """With b < 0 the class that has most of the pool is given less of it, with b > 0 more."""
    support, labels, pool = items(seed=3, ways=2, shots=1, pool=30)
    pool = torch.cat([pool[::2], pool[1::2][:3]])  # 15 of the first class, 3 of the second

    def share(b: float) -> float:
        scorer = learned(PLAIN, temperature=2.0, rounds=3)
        with torch.no_grad():
            scorer.numbers[:, 2] = b / SPEED
        return scorer(support, labels, pool, 2)[:, 0].mean().item()

    assert share(-0.5) < share(0.0) < share(0.5)
