"""MeTAL's losses: for every inner step two networks of its own, whose weights are adapted to the task."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npbml.nets.layers import initialise
from npbml.rule.descend import Parameters

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
        """items [n, inputs] and the state [state] of the task -> their mean loss, a scalar"""
        multipliers, offsets = self.adapter(state).chunk(2)
        phi = (self.hidden.weight, self.hidden.bias, self.last.weight, self.last.bias)
        scales, shifts = (1 + self.k * multipliers).unbind(), (self.c * offsets).unbind()
        w1, b1, w2, b2 = (scale * p + shift for scale, p, shift in zip(scales, phi, shifts, strict=True))
        return F.linear(F.relu(F.linear(items, w1, b1)), w2, b2).mean()


class AdaptiveLosses(nn.Module):
    """M_j = CE_S + L^S_j + L^Q_j: the learned terms of every step j, those that are on."""

    def __init__(self, ways: int, tensors: int, steps: int, support: bool = True, query: bool = True) -> None:
        """`ways` classes and `tensors` adapted tensors: the sizes of the networks' inputs."""
        super().__init__()

        def networks(inputs: int, state: int) -> nn.ModuleList:
            return nn.ModuleList(AdaptiveLoss(inputs, state) for _ in range(steps))

        both = tensors + ways + 1
        self.support = networks(both + ways, tensors + 1) if support else None
        self.query = networks(both, both) if query else None

    def forward(
        self, step: int, base: Tensor, theta: Parameters, support: Tensor, labels: Tensor, query: Tensor
    ) -> dict[str, Tensor]:
        """base = CE_S, support logits and labels one-hot [n, ways], query logits [m, ways] -> terms by name"""
        terms = {}
        if self.support is not None:
            terms["adaptive_support"] = self.support[step](*support_inputs(base, theta, support, labels))
        if self.query is not None:
            terms["adaptive_query"] = self.query[step](*query_inputs(theta, query))
        return terms

    def begin(self, std: float, generator: torch.Generator) -> None:
        """Weights ~ N(0, std^2), biases 0; k = c = 0, so that the adapters begin without effect."""
        initialise(self, std, generator)
        for part in self.modules():
            if isinstance(part, AdaptiveLoss):
                nn.init.zeros_(part.k)
                nn.init.zeros_(part.c)


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
