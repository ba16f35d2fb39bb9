"""Whitening by products alone is what eigenvalues say."""

import pytest
import torch

from npbml.randomness import generator
from npbml.scorers.whiten import matrix_root, whiten


def test_items_are_whitened_by_the_fourth_root_of_their_covariance() -> None:
    items = torch.randn(12, 30, generator=generator(0, "items"), dtype=torch.float64)
    items[:, :3] *= 20.0  # most of it lies in a few directions
    items = items - items.mean(0)
    left, values, right = torch.linalg.svd(items, full_matrices=False)
    expected = left * values.sqrt() @ right
    found = whiten(items)
    torch.testing.assert_close(found @ found.T, expected @ expected.T, rtol=0, atol=2e-3 * values[0].item())
    assert whiten(items.float()).dtype == torch.float32


@pytest.mark.parametrize("rank", [1, 5, 40])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_the_root_of_a_matrix_is_that_by_eigenvalues(rank: int, size: float) -> None:
    factor = torch.randn(20, rank, generator=generator(0, "root"), dtype=torch.float64)
    matrix = size * factor @ factor.T
    values, vectors = torch.linalg.eigh(matrix + 1e-5 * matrix.norm() * torch.eye(20, dtype=torch.float64))
    expected = vectors * values.sqrt() @ vectors.T
    torch.testing.assert_close(matrix_root(matrix), expected, rtol=0, atol=1e-8 * expected.norm().item())
