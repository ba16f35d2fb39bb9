"""The meta-learned loss M = L_base + L^S + L^Q + R (the paper's section 3.3), and the losses of other methods."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npbml.nets.layers import initialise
from npbml.rule.adaptive import AdaptiveLosses
from npbml.rule.critic import Critic
from npbml.rule.descend import Parameters
from npbml.rule.modulate import FiLM, small_linear
from npbml.settings import setting

EPS = 1e-12  # keeps the second derivatives of a root finite where a tensor is zero or constant


@dataclass(frozen=True)
class LossSettings:
    """The meta-learned loss."""

    base: bool = setting(True)
    """Cross-entropy on the support set, or squared error for values."""
    inductive: bool = setting(True)
    """The inductive network L^S, on the support set."""
    transductive: bool = setting(True)
    """The transductive network L^Q, on the query images and their relation scores."""
    regulariser: bool = setting(True)
    """The regulariser R, on statistics of the adapted tensors."""
    adaptive_support: bool = setting(False)
    """A network for each inner step on the support set, adapted to the task (MeTAL)."""
    adaptive_query: bool = setting(False)
    """A network for each inner step on the query images, adapted to the task (MeTAL)."""
    critic_steps: int = setting(0, low=0)
    """Steps on the critic of the query predictions, after those on the other terms (SCA); 0: no critic."""
    hidden: int = setting(40, low=1)
    """Width of the two hidden layers."""
    film: bool = setting(True)
    """Modulate the loss networks (docs/method.md, item 19)."""
    inputs: Literal["logits", "softmax"] = setting("logits")
    """Predictions as the networks see them: raw logits or probabilities (item 16)."""
    target: Literal["argmax", "soft"] = setting("argmax")
    """The query items' target: the class of the highest relation score, or the normalised scores (item 21)."""
    trust: float = setting(0.0, low=0)
    """Add the query items' cross-entropy to their target to L^Q, by a weight that begins here and is learned."""
    activation: Literal["identity", "smooth_leaky"] = setting("identity")
    """Output activation; smooth_leaky is x/4 + 3/4 softplus_5(x) (item 17)."""
    share: bool = setting(False)
    """Let L^Q use the network of L^S, as the reference code does (item 20)."""
    statistics: Literal["exact", "reference"] = setting("exact")
    """R's inputs; reference: mean and deviation carry no gradient and L1 is L2 (item 15)."""
    averaged: bool = setting(False)
    """Divide L1 by the number of entries and L2 by its root: over a whole layer the sums run into thousands."""

    @property
    def learned(self) -> dict[str, bool]:
        """The terms that have networks, and whether they are on."""
        names = ("inductive", "transductive", "regulariser", "adaptive_support", "adaptive_query")
        return {name: getattr(self, name) for name in names}

    @property
    def fixes_ways(self) -> bool:
        """Whether a network's input has a slot for each class, so that it takes one number of ways only."""
        return self.critic_steps > 0 or any(on for name, on in self.learned.items() if name != "regulariser")


class LossNetwork(nn.Module):
    """inputs -> hidden -> hidden -> 1, each linear layer modulated by its own input (Figure 4)."""

    def __init__(self, inputs: int, hidden: int, film: bool, activation: str = "identity") -> None:
        super().__init__()
        sizes = [(inputs, hidden), (hidden, hidden), (hidden, 1)]
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in sizes)
        self.films = nn.ModuleList(FiLM(i, o) for i, o in sizes) if film else None
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """items [n, inputs] -> their mean loss, a scalar"""
        for index, layer in enumerate(self.layers):
            y = small_linear(x, layer)  # type: ignore[arg-type]
            if self.films is not None:
                y = self.films[index](x, y)
            x = F.relu(y) if index < 2 else y
        if self.activation == "smooth_leaky":
            x = 0.25 * x + 0.75 * F.softplus(x, beta=5.0)
        return x.mean()


class LearnedLoss(nn.Module):
    """M(support, query, theta), the sum of the terms that are switched on."""

    def __init__(
        self, settings: LossSettings, outputs: int, tensors: int, steps: int, base: "BaseLoss | None" = None
    ) -> None:
        """`outputs` of the head, `tensors` adapted tensors and inner `steps`: the sizes of the networks."""
        super().__init__()
        self.settings, self.base = settings, base or cross_entropy

        def network(inputs: int) -> LossNetwork:
            return LossNetwork(inputs, settings.hidden, settings.film, settings.activation)

        self.inductive = network(2 * outputs + 1) if settings.inductive else None
        own = settings.transductive and not settings.share
        self.transductive = network(2 * outputs + 1) if own else None
        self.trust: nn.Parameter | None = None
        if settings.transductive and settings.trust:
            self.trust = nn.Parameter(torch.tensor(settings.trust))
        self.regulariser = network(4 * tensors) if settings.regulariser else None
        sides = (settings.adaptive_support, settings.adaptive_query)
        self.adaptive = AdaptiveLosses(outputs, tensors, steps, *sides) if any(sides) else None
        self.critic = Critic(outputs) if settings.critic_steps else None

    @property
    def of_queries(self) -> LossNetwork | None:
        """The network of L^Q. One that is shared has one name: of two, compiled code keeps an old value."""
        return self.inductive if self.settings.transductive and self.settings.share else self.transductive

    def begin(self, std: float, generator: torch.Generator, uniform_bias: bool = False) -> None:
        """The start of every network."""
        for part in (self.inductive, self.transductive, self.regulariser):
            if part is not None:
                initialise(part, std, generator, uniform_bias)
        for other in (self.adaptive, self.critic):
            if other is not None:
                other.begin(std, generator)

    def forward(
        self, support: Tensor, labels: Tensor, query: Tensor, scores: Tensor, theta: Parameters, step: int = 0
    ) -> Tensor:
        """support logits [n, outputs], labels one-hot [n, outputs], query logits and relation scores [m, ways]"""
        return sum(self.terms(support, labels, query, scores, theta, step).values(), support.new_zeros(()))

    def terms(
        self, support: Tensor, labels: Tensor, query: Tensor, scores: Tensor, theta: Parameters, step: int = 0
    ) -> dict[str, Tensor]:
        """Each term by its name."""
        base = self.base(support, labels)
        terms = {}
        if self.settings.base:
            terms["base"] = base.mean()
        if self.inductive is not None:
            terms["inductive"] = self.inductive(self.items(support, labels, base))
        if self.of_queries is not None:
            apart = cross_entropy(query, self.target(scores))
            terms["transductive"] = self.of_queries(self.items(query, scores, apart))
            if self.trust is not None:
                terms["transductive"] = terms["transductive"] + self.trust * apart.mean()
        if self.regulariser is not None:
            terms["regulariser"] = self.regulariser(self.summary(theta).unsqueeze(0))
        if self.adaptive is not None:
            terms |= self.adaptive(step, base.mean(), theta, support, labels, query)
        return terms

    def items(self, logits: Tensor, target: Tensor, loss: Tensor) -> Tensor:
        predictions = logits.softmax(-1) if self.settings.inputs == "softmax" else logits
        return torch.cat([predictions, target, loss.unsqueeze(-1)], -1)

    def target(self, scores: Tensor) -> Tensor:
        if self.settings.target == "soft":
            return scores / scores.sum(-1, keepdim=True)
        return one_hot(scores.argmax(-1), scores.shape[-1], scores.dtype)

    def summary(self, theta: Parameters) -> Tensor:
        """mean, deviation, L1 and L2 norm of each adapted tensor, in order: [4 * tensors]"""
        rows = []
        for tensor in theta.values():
            spread = tensor.var(correction=min(1, tensor.numel() - 1))  # unbiased, but 0 for a single number
            mean, deviation = tensor.mean(), (spread + EPS).sqrt()
            l1, l2 = tensor.abs().sum(), (tensor.square().sum() + EPS).sqrt()
            if self.settings.averaged:
                l1, l2 = l1 / tensor.numel(), l2 / tensor.numel() ** 0.5
            if self.settings.statistics == "reference":
                mean, deviation, l1 = mean.detach(), deviation.detach(), l2
            rows += [mean, deviation, l1, l2]
        return torch.stack(rows)


def one_hot(labels: Tensor, ways: int, dtype: torch.dtype) -> Tensor:
    """labels [n] -> [n, ways]; unlike torch's own, it looks at no value, so it can be batched and captured"""
    return (labels.unsqueeze(-1) == torch.arange(ways, device=labels.device)).to(dtype)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """L_base per item: logits [n, ways] against target probabilities [n, ways] -> [n]"""
    return -(target * logits.log_softmax(-1)).sum(-1)


def squared_error(values: Tensor, target: Tensor) -> Tensor:
    """L_base per item of a regression: [n, outputs] against [n, outputs] -> [n]"""
    return (values - target).square().sum(-1)


BaseLoss = Callable[[Tensor, Tensor], Tensor]
BASES: dict[str, BaseLoss] = {"classes": cross_entropy, "values": squared_error}
