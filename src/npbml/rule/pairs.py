"""What class-symmetric networks see: pairs of an item and a class, with no slot for any class (docs/method.md)."""

import torch
from torch import Tensor

from npbml.rule.settings import shape_sizes

INPUTS = 8  # of a pair whose item has a target
UNLABELLED = 6  # of a pair whose item has none
CONTEXT = 5  # more, where the shape of the task is told


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

    As `shape_sizes`, with log n_c, of the labelled items of the class, in the place of the log of the shots.
    """
    counts = labels.sum(0).clamp_min(1.0).log()
    support, ways = labels.shape
    of_ways, _, of_pool = (torch.full_like(counts, size) for size in shape_sizes(ways, support, unlabelled))
    return torch.stack([of_ways, counts, of_pool], -1)


def mix_classes(factors: Tensor, x: Tensor, axis: int) -> Tensor:
    """(a I + (b / ways) 11^T) x along the axis of the classes, with factors (a, b): a x + b mean(x).

    All linear maps that commute with permutations of the classes are of this form. The eigenvalues, a and a + b,
    do not depend on the number of classes.
    """
    a, b = factors.unbind()
    return a * x + b * x.mean(axis, keepdim=True)
