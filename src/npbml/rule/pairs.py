"""What class-symmetric networks see: pairs of an item and a class, with no slot for any class (docs/method.md)."""

import math

import torch
from torch import Tensor

INPUTS = 8  # of a pair whose item has a target
UNLABELLED = 6  # of a pair whose item has none
CONTEXT = 5  # more, where the shape of the task is told
USUAL_WAYS, USUAL_POOL = 5, 75  # of the benchmarks


def pair_inputs(
    logits: Tensor, target: Tensor | None = None, loss: Tensor | None = None, balanced: bool = False
) -> Tensor:
    """What a network sees of each item and class.

    logits and target [n, ways], loss [n] -> [n, ways, 8], or 6 without target and loss; one more with the share of
    the class in the batch (`balanced`)
    """
    ways = logits.shape[-1]
    mean, log_p = logits.mean(-1, keepdim=True), logits.log_softmax(-1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(-1, keepdim=True)
    own = torch.eye(ways, dtype=torch.bool, device=logits.device)
    # At theta_0 the logits tie: amax shares its gradient among equals, so that no class is preferred.
    rival = logits.unsqueeze(-2).masked_fill(own, -torch.inf).amax(-1)
    told = [] if target is None or loss is None else [target, loss.unsqueeze(-1)]
    rows = [logits - mean, log_p, p, *told, entropy, logits - rival, mean]
    if balanced:
        rows.append(ways * p.mean(0, keepdim=True))
    return torch.stack([row.expand_as(logits) for row in rows], -1)


def context_inputs(logits: Tensor, target: Tensor, labels: Tensor, unlabelled: int) -> Tensor:
    """What a network sees of the task for each item and class, [n, ways, 5].

    The shares that the class has of the predictions and of the targets of these items, in units of 1 / ways, and
    what the shape of the task says.
    """
    ways = logits.shape[-1]
    shares = ways * logits.softmax(-1).mean(0), ways * target.mean(0)
    rows = torch.cat([torch.stack(shares, -1), shape_inputs(labels, unlabelled)], -1)
    return rows.expand(*logits.shape, CONTEXT)


def shape_inputs(labels: Tensor, unlabelled: int) -> Tensor:
    """What the shape of a task says of each class, of one-hot labels [n, ways]: [ways, 3].

    log(ways / 5), log n_c (labelled items of the class) and |U| / (|U| + 75) - 1 / 2, all 0 for 5x1+75. The last
    one is bounded, as a pool may be far larger than those of meta-training.
    """
    ways = labels.shape[-1]
    counts = labels.sum(0).clamp_min(1.0).log()
    sizes = math.log(ways / USUAL_WAYS), unlabelled / (unlabelled + USUAL_POOL) - 0.5
    return torch.stack([torch.full_like(counts, sizes[0]), counts, torch.full_like(counts, sizes[1])], -1)


def mix_classes(factors: Tensor, x: Tensor, axis: int) -> Tensor:
    """(a I + (b / ways) 11^T) x along the axis of the classes, with factors (a, b): a x + b mean(x).

    All linear maps that commute with permutations of the classes are of this form. The eigenvalues, a and a + b,
    do not depend on the number of classes.
    """
    a, b = factors.unbind()
    return a * x + b * x.mean(axis, keepdim=True)
