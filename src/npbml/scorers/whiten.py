"""Whitening of a task's embeddings, by products alone, which a GPU can record."""

import torch
from torch import Tensor

LEAST = 1e-5  # of the norm of a matrix, which is added to its eigenvalues
SMALLEST = 1e-12  # of a squared length that is divided by


def whiten(items: Tensor) -> Tensor:
    """items [n, width] -> [n, n], whose inner products are the root of the matrix of those of the items.

    The singular values become their roots, as if the items were multiplied by the inverse of the fourth root of
    their covariance. A rotation of all items is left open, which no angle sees.
    """
    wide = items.double()  # what is small among the singular values is lost in less
    return matrix_root(matrix_root(wide @ wide.T)).to(items.dtype)


def whitened_cosines(items: Tensor) -> Tensor:
    """The cosines [n, n] of `whiten(items)` with each other, by one root instead of two."""
    wide = items.double()
    root = matrix_root(wide @ wide.T)
    products = root + LEAST * root.norm() * torch.eye(len(root), dtype=root.dtype, device=root.device)
    scale = products.diagonal().clamp_min(SMALLEST).rsqrt()
    return (scale[:, None] * products * scale).to(items.dtype)


def matrix_root(matrix: Tensor, steps: int = 20, least: float = LEAST) -> Tensor:
    """The root of a symmetric matrix with no negative eigenvalue, by products alone, which a GPU can record.

    Newton and Schulz's iteration needs eigenvalues above 0 and a step for each factor of 2.25 that they differ by:
    `least` of the norm is added to all.
    """
    identity = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    size = matrix.norm().clamp_min(torch.finfo(matrix.dtype).tiny)  # items may be equal
    found, inverse = matrix / size + least * identity, identity
    for _ in range(steps):
        change = 1.5 * identity - 0.5 * inverse @ found
        found, inverse = found @ change, change @ inverse
    return found * size.sqrt()
