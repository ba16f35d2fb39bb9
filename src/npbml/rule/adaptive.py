"""MeTAL's losses: for every inner step two networks of its own, whose weights are adapted to the task."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npbml.nets.layers import initialise
from npbml.rule.descend import Parameters
from npbml.rule.loss import Items, Sizes
from npbml.rule.pairs import INPUTS, UNLABELLED, pair_inputs
from npbml.rule.settings import LossSettings

EPS = 1e-12


class AdaptiveLoss(nn.Module):
    """The loss network of one step, inputs -> inputs -> 1, and the adapter of its four tensors phi_i.

    m_i, o_i = adapter(state),  phi_i' = (1 + k_i m_i) phi_i + c_i o_i
    """

    def __init__(self, inputs: int, state: int) -> None:
        super().__init__()
        self.hidden, self.last = nn.Linear(inputs, inputs), nn.Linear(inputs, 1)
        self.adapter = nn.Sequential(nn.Linear(state, state), nn.ReLU(), nn.Linear(state, 8))
        self.k, self.c = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

    def forward(self, items: Tensor, state: Tensor) -> Tensor:
        """items [..., inputs] and the state [state] of the task -> their mean loss, a scalar"""
        multipliers, offsets = self.adapter(state).chunk(2)
        phi = (self.hidden.weight, self.hidden.bias, self.last.weight, self.last.bias)
        scales, shifts = (1 + self.k * multipliers).unbind(), (self.c * offsets).unbind()
        w1, b1, w2, b2 = (scale * p + shift for scale, p, shift in zip(scales, phi, shifts, strict=True))
        return F.linear(F.relu(F.linear(items, w1, b1)), w2, b2).mean()


class PerStep(nn.ModuleList):
    """A term with a network of its own for every inner step."""

    def __init__(self, inputs: int, state: int, steps: int) -> None:
        super().__init__(AdaptiveLoss(inputs, state) for _ in range(steps))

    def begin(self, std: float, generator: torch.Generator, uniform_bias: bool) -> None:
        """Weights ~ N(0, std^2), biases 0; k = c = 0, so that the adapters begin without effect."""
        initialise(self, std, generator)
        for part in self:
            nn.init.zeros_(part.k)  # type: ignore[arg-type]
            nn.init.zeros_(part.c)  # type: ignore[arg-type]


class AdaptiveSupport(PerStep):
    """L^S_j, on the support items."""

    fixes_ways = per_step = True

    def __init__(self, sizes: Sizes, settings: LossSettings) -> None:
        super().__init__(sizes.tensors + 2 * sizes.outputs + 1, sizes.tensors + 1, sizes.steps)

    def forward(self, items: Items) -> Tensor:
        seen = support_inputs(items.base.mean(), items.theta, items.support, items.labels)
        return self[items.step](*seen)


class AdaptiveQuery(PerStep):
    """L^Q_j, on the query items."""

    fixes_ways = per_step = needs_query = needs_classes = True

    def __init__(self, sizes: Sizes, settings: LossSettings) -> None:
        inputs = sizes.tensors + sizes.outputs + 1
        super().__init__(inputs, inputs, sizes.steps)

    def forward(self, items: Items) -> Tensor:
        return self[items.step](*query_inputs(items.theta, items.query))


class SymmetricAdaptiveSupport(PerStep):
    """L^S_j, on pairs of a support item and a class: for any number of classes."""

    per_step = needs_classes = True

    def __init__(self, sizes: Sizes, settings: LossSettings) -> None:
        super().__init__(sizes.tensors + 1 + INPUTS + settings.balanced, sizes.tensors + 1, sizes.steps)
        self.balanced = settings.balanced

    def forward(self, items: Items) -> Tensor:
        state = torch.cat([items.base.mean().unsqueeze(0), means(items.theta)])
        pairs = pair_inputs(items.support, items.labels, items.base, self.balanced)
        return sum_over_classes(self[items.step], with_state(state, pairs), standardise(state))


class SymmetricAdaptiveQuery(PerStep):
    """L^Q_j, on pairs of a query item and a class: for any number of classes."""

    per_step = needs_query = needs_classes = True

    def __init__(self, sizes: Sizes, settings: LossSettings) -> None:
        inputs = sizes.tensors + UNLABELLED + settings.balanced
        super().__init__(inputs, inputs, sizes.steps)
        self.balanced = settings.balanced

    def forward(self, items: Items) -> Tensor:
        pairs = with_state(means(items.theta), pair_inputs(items.query, balanced=self.balanced))
        return sum_over_classes(self[items.step], pairs, pairs.mean((0, 1)))


def with_state(state: Tensor, pairs: Tensor) -> Tensor:
    """state [state] beside each of pairs [n, ways, inputs]: [n, ways, state + inputs], standardised"""
    return standardise(torch.cat([state.expand(*pairs.shape[:2], -1), pairs], -1))


def sum_over_classes(loss: nn.Module, pairs: Tensor, state: Tensor) -> Tensor:
    """The mean over items of the sum over classes of a loss of pairs [n, ways, inputs]"""
    return pairs.shape[1] * loss(pairs, state)


def support_inputs(base: Tensor, theta: Parameters, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """L^S sees CE_S, the mean of each adapted tensor, and an item's logits and label.

    base [], logits and labels [n, ways] -> items [n, tensors + 1 + 2 ways] and state [tensors + 1]
    """
    state = torch.cat([base.unsqueeze(0), means(theta)])
    items = torch.cat([state.expand(len(logits), -1), logits, labels], -1)
    return standardise(items), standardise(state)


def query_inputs(theta: Parameters, logits: Tensor) -> tuple[Tensor, Tensor]:
    """L^Q sees the mean of each adapted tensor, and an item's logits and negative entropy sum_c p_c log p_c.

    logits [m, ways] -> items [m, tensors + ways + 1] and their mean, the state [tensors + ways + 1]
    """
    negative_entropy = (logits.softmax(-1) * logits.log_softmax(-1)).sum(-1, keepdim=True)
    items = standardise(torch.cat([means(theta).expand(len(logits), -1), logits, negative_entropy], -1))
    return items, items.mean(0)


def means(theta: Parameters) -> Tensor:
    """The mean of each adapted tensor, in order: [tensors]"""
    return torch.stack([tensor.mean() for tensor in theta.values()])


def standardise(x: Tensor) -> Tensor:
    """(x - mean(x)) / std(x), with one mean and one deviation over all entries."""
    # MeTAL adds 1e-12 to the deviation, which keeps the value finite where all entries are equal, but not the
    # derivatives: that of a root at zero is infinite. Added under the root, it keeps both.
    return (x - x.mean()) / (x.var() + EPS).sqrt()
