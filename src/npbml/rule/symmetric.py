"""Class-symmetric losses: one network looks at every pair of an item and a class (docs/method.md).

    L = (1 / n) sum_i sum_c m(x_ic)

    x_ic = [ z_ic - mean z_i,  log p_ic,  p_ic,  t_ic,  l_i,  H_i,  z_ic - max_{c' != c} z_ic',  mean z_i ]

z are the logits, p = softmax(z), t the one-hot label or the scores, l the base loss and H the entropy of the item.
No input has a slot for a class: the loss takes any number of classes, and permuting them changes nothing else.
Where the classes of a batch may be taken for balanced (loss.balanced), there is one more input: ways times the
mean of p_c over the items. With the task's shape as context (loss.context) there are five more:

    N mean_i p_ic,  N mean_i t_ic,  log(N / 5),  log n_c,  |U| / (|U| + 75) - 1 / 2

and L^Q is multiplied by (|U| / (|S| + |U|))^g, where g is learned and starts at 1: a small pool says little.
"""

import math

import torch
from torch import Tensor, nn

from npbml.rule.loss import Items, NetworkTerm, Sizes, query_term
from npbml.rule.pairs import CONTEXT, INPUTS, context_inputs, pair_inputs
from npbml.rule.settings import LossSettings


class SymmetricTerm(NetworkTerm):
    """The network m, and the mean over items of its sum over classes."""

    needs_classes = True

    def __init__(self, sizes: Sizes, settings: LossSettings) -> None:
        super().__init__(INPUTS + settings.balanced + CONTEXT * settings.context, settings)

    def of(self, logits: Tensor, target: Tensor, loss: Tensor, items: Items) -> Tensor:
        pairs = pair_inputs(logits, target, loss, self.settings.balanced)
        if self.settings.context:
            pairs = torch.cat([pairs, context_inputs(logits, target, items.labels, len(items.query))], -1)
        return pairs.shape[1] * self.mean_loss(pairs.flatten(0, 1))


class SymmetricSupport(SymmetricTerm):
    """L^S of pairs of a support item and a class."""

    def forward(self, items: Items) -> Tensor:
        return self.of(items.support, items.labels, items.base, items)


class SymmetricQuery(SymmetricTerm):
    """L^Q of pairs of a query item and a class, and the weighted cross-entropy to the scores."""

    needs_query = needs_scores = True

    def __init__(self, sizes: Sizes, settings: LossSettings) -> None:
        super().__init__(sizes, settings)
        self.gate = nn.Parameter(torch.ones(())) if settings.context else None

    def forward(self, items: Items) -> Tensor:
        value, pool = query_term(self, items), len(items.query)
        if self.gate is None:
            return value
        return (self.gate * math.log(pool / (pool + len(items.support)))).exp() * value
