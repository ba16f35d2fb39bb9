"""Class-symmetric losses: one network looks at every pair of an item and a class (docs/method.md).

    L = (1 / n) sum_i sum_c m(x_ic)

    x_ic = [ z_ic - mean z_i,  log p_ic,  p_ic,  t_ic,  l_i,  H_i,  z_ic - max_{c' != c} z_ic',  mean z_i ]

z are the logits, p = softmax(z), t the one-hot label or the scores, l the base loss and H the entropy of the item.
No input has a slot for a class: the loss takes any number of classes, and permuting them changes nothing else.
Where the classes of a batch may be taken for balanced (loss.balanced), there is one more input: ways times the
mean of p_c over the items.
"""

import torch
from torch import Tensor

from npbml.rule.loss import Items, NetworkTerm, Sizes, query_term
from npbml.rule.settings import LossSettings

INPUTS = 8


class SymmetricTerm(NetworkTerm):
    """The network m, and the mean over items of its sum over classes."""

    needs_classes = True

    def __init__(self, sizes: Sizes, settings: LossSettings) -> None:
        super().__init__(INPUTS + settings.balanced, settings)

    def of(self, logits: Tensor, target: Tensor, loss: Tensor) -> Tensor:
        pairs = pair_inputs(logits, target, loss, self.settings.balanced)
        return pairs.shape[1] * self.mean_loss(pairs.flatten(0, 1))


class SymmetricSupport(SymmetricTerm):
    """L^S of pairs of a support item and a class."""

    def forward(self, items: Items) -> Tensor:
        return self.of(items.support, items.labels, items.base)


class SymmetricQuery(SymmetricTerm):
    """L^Q of pairs of a query item and a class, and the weighted cross-entropy to the scores."""

    needs_query = needs_scores = True

    def forward(self, items: Items) -> Tensor:
        return query_term(self, items)


def pair_inputs(logits: Tensor, target: Tensor, loss: Tensor, balanced: bool = False) -> Tensor:
    """What the network sees of each item and class: [n, ways, 8], or 9 with the share of the class in the batch"""
    ways = logits.shape[-1]
    mean, log_p = logits.mean(-1, keepdim=True), logits.log_softmax(-1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(-1, keepdim=True)
    own = torch.eye(ways, dtype=torch.bool, device=logits.device)
    # At theta_0 the logits tie: amax shares its gradient among equals, so that no class is preferred.
    rival = logits.unsqueeze(-2).masked_fill(own, -torch.inf).amax(-1)
    rows = [logits - mean, log_p, p, target, loss.unsqueeze(-1), entropy, logits - rival, mean]
    if balanced:
        rows.append(ways * p.mean(0, keepdim=True))
    return torch.stack([row.expand_as(logits) for row in rows], -1)
