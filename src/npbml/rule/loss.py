"""The meta-learned loss M = L_base + L^S + L^Q + R (the paper's section 3.3), and the terms of other methods.

A term is a module of the registry `LOSS_TERMS`, made from `Sizes` and called with `Items`:

    @npbml.LOSS_TERMS("margin")
    class Margin(npbml.LossTerm):
        def forward(self, items):
            return ...  # a scalar
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npbml.nets.layers import initialise
from npbml.parts import LOSS_TERMS
from npbml.rule.critic import Critic, SymmetricCritic
from npbml.rule.descend import Parameters
from npbml.rule.modulate import FiLM, small_linear
from npbml.rule.settings import LossSettings

EPS = 1e-12  # keeps the second derivatives of a root finite where a tensor is zero or constant


class Sizes(NamedTuple):
    """What the networks of the loss are sized by."""

    outputs: int  # of the head: the number of classes, or of values
    tensors: int  # that adapt
    steps: int  # of the inner loop


class Items(NamedTuple):
    """What a term of the loss may look at, of one inner step of one task."""

    support: Tensor  # logits [n, outputs]
    labels: Tensor  # [n, outputs]: one-hot, or values
    query: Tensor  # logits [m, outputs]; no rows where the inner batch has no query items
    scores: Tensor  # [m, outputs] of the query items, or [m, 0]
    theta: Parameters  # the adapted tensors by name
    step: int
    base: Tensor  # the base loss of each support item, [n]
    score_weight: Tensor | None = None  # of the query items' cross-entropy to their scores


class LossTerm(nn.Module):
    """One term of the inner loss. A subclass defines `forward`, and `begin` where it has weights to draw."""

    symbol = ""
    learned = True
    fixes_ways = needs_query = needs_scores = needs_classes = per_step = False

    def __init__(self, sizes: Sizes, settings: LossSettings) -> None:
        super().__init__()

    def forward(self, items: Items) -> Tensor:
        """The value of the term, a scalar."""
        raise TypeError(f"{type(self).__name__} is a loss term without a `forward`: define one.")

    def begin(self, std: float, generator: torch.Generator, uniform_bias: bool) -> None:
        """Draw what starts at random: the weights of linear layers and convolutions ~ N(0, std^2)."""
        initialise(self, std, generator, uniform_bias)


class LossNetwork(nn.Module):
    """inputs -> hidden -> hidden -> 1, each linear layer modulated by its own input (Figure 4)."""

    def __init__(self, inputs: int, hidden: int, film: bool, activation: str = "identity") -> None:
        nn.Module.__init__(self)
        sizes = [(inputs, hidden), (hidden, hidden), (hidden, 1)]
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in sizes)
        self.films = nn.ModuleList(FiLM(i, o) for i, o in sizes) if film else None
        self.activation = activation

    def mean_loss(self, x: Tensor) -> Tensor:
        """items [n, inputs] -> their mean loss, a scalar"""
        for index, layer in enumerate(self.layers):
            y = small_linear(x, layer)  # type: ignore[arg-type]
            if self.films is not None:
                y = self.films[index](x, y)
            x = F.relu(y) if index < 2 else y
        if self.activation == "smooth_leaky":
            x = 0.25 * x + 0.75 * F.softplus(x, beta=5.0)
        return x.mean()


class BaseTerm(LossTerm):
    """L_base: cross-entropy on the support set, or squared error for values.

    Its mean over the items or, with loss.class_weights=classes, the mean over classes of the means of their items.
    """

    learned = False

    def __init__(self, sizes: Sizes, settings: LossSettings) -> None:
        super().__init__(sizes, settings)
        self.by_class = settings.class_weights == "classes"

    def forward(self, items: Items) -> Tensor:
        if not self.by_class:
            return items.base.mean()
        return (items.base @ (items.labels / items.labels.sum(0))).mean()


class NetworkTerm(LossNetwork, LossTerm):
    """A term that is a network of its own."""

    def __init__(self, inputs: int, settings: LossSettings) -> None:
        LossNetwork.__init__(self, inputs, settings.hidden, settings.film, settings.activation)
        self.settings = settings

    def inputs(self, logits: Tensor, target: Tensor, loss: Tensor) -> Tensor:
        """What the network sees of items: predictions, target and base loss, [n, 2 * outputs + 1]."""
        predictions = logits.softmax(-1) if self.settings.inputs == "softmax" else logits
        return torch.cat([predictions, target, loss.unsqueeze(-1)], -1)

    def of(self, logits: Tensor, target: Tensor, loss: Tensor, items: Items) -> Tensor:
        """The mean loss of some of the items, with logits and targets [n, ways] and base losses [n]."""
        return self.mean_loss(self.inputs(logits, target, loss))


class Inductive(NetworkTerm):
    """L^S: a network on the support items, with a slot for each class."""

    fixes_ways = True

    def __init__(self, sizes: Sizes, settings: LossSettings) -> None:
        super().__init__(2 * sizes.outputs + 1, settings)

    def forward(self, items: Items) -> Tensor:
        return self.of(items.support, items.labels, items.base, items)


class Transductive(NetworkTerm):
    """L^Q: a network on the query items and their scores, with a slot for each class."""

    fixes_ways = needs_query = needs_scores = needs_classes = True

    def __init__(self, sizes: Sizes, settings: LossSettings) -> None:
        super().__init__(2 * sizes.outputs + 1, settings)

    def forward(self, items: Items) -> Tensor:
        return query_term(self, items)


def query_term(network: NetworkTerm, items: Items) -> Tensor:
    """L^Q by a network, which may be that of L^S, and the weighted cross-entropy to the scores."""
    apart = cross_entropy(items.query, target_of(items.scores, network.settings.target))
    value = network.of(items.query, items.scores, apart, items)
    return value if items.score_weight is None else value + items.score_weight * apart.mean()


class Regulariser(NetworkTerm):
    """R: a network on statistics of the adapted tensors."""

    def __init__(self, sizes: Sizes, settings: LossSettings) -> None:
        super().__init__(4 * sizes.tensors, settings)

    def forward(self, items: Items) -> Tensor:
        return self.mean_loss(tensor_statistics(items.theta, self.settings).unsqueeze(0))


class LearnedLoss(nn.Module):
    """M(support, query, theta), the sum of the terms that are switched on."""

    def __init__(
        self,
        settings: LossSettings,
        outputs: int,
        tensors: int,
        steps: int,
        base: "BaseLoss | None" = None,
        symmetric: bool = False,
    ) -> None:
        """`outputs` of the head, `tensors` adapted tensors and inner `steps`: the sizes of the networks.

        Of terms with a slot for each class, and of the critic, there are the class-symmetric forms (`symmetric`).
        """
        super().__init__()
        self.settings, self.base_loss = settings, base or cross_entropy
        sizes, weighted = Sizes(outputs, tensors, steps), settings.has("needs_scores") and settings.score_weight
        self.score_weight = nn.Parameter(torch.tensor(settings.score_weight)) if weighted else None
        self.active = settings.active  # once: to look for it is slow, and a compiler cannot
        # L^Q by the network of L^S has one name: of two, compiled code keeps an old value.
        self.names = tuple(name for name in self.active if not (settings.share and name == "transductive"))
        for name in self.names:
            self.add_module(name, LOSS_TERMS.get(name, symmetric)(sizes, settings))
        self.critic: Critic | SymmetricCritic | None = None
        if settings.critic_steps:
            self.critic = SymmetricCritic(settings.balanced) if symmetric else Critic(outputs)

    def term(self, name: str) -> nn.Module | None:
        """The module of a term, where it is on; of L^Q, that of L^S where they share it."""
        shared = name == "transductive" and self.settings.transductive and self.settings.share
        return self._modules.get("inductive" if shared else name)

    def begin(self, std: float, generator: torch.Generator, uniform_bias: bool = False) -> None:
        """The start of every network."""
        for name in self.names:
            self.get_submodule(name).begin(std, generator, uniform_bias)  # type: ignore[operator]
        if self.critic is not None:
            self.critic.begin(std, generator)

    def forward(
        self, support: Tensor, labels: Tensor, query: Tensor, scores: Tensor, theta: Parameters, step: int = 0
    ) -> Tensor:
        """support logits [n, outputs], labels one-hot [n, outputs], query logits and scores [m, ways]"""
        return sum(self.terms(support, labels, query, scores, theta, step).values(), support.new_zeros(()))

    def terms(
        self, support: Tensor, labels: Tensor, query: Tensor, scores: Tensor, theta: Parameters, step: int = 0
    ) -> dict[str, Tensor]:
        """Each term by its name."""
        base = self.base_loss(support, labels)
        items = Items(support, labels, query, scores, theta, step, base, self.score_weight)
        values: dict[str, Tensor] = {}
        for name in self.active:
            if not len(query) and LOSS_TERMS.fact(name, "needs_query"):
                continue  # there is no unlabelled item
            own = self._modules.get(name)
            values[name] = query_term(self.term(name), items) if own is None else own(items)  # type: ignore[arg-type]
        return values


def target_of(scores: Tensor, kind: str) -> Tensor:
    """The target of query items with these scores: the class of the highest one, or the normalised scores."""
    if kind == "soft":
        return scores / scores.sum(-1, keepdim=True)
    return one_hot(scores.argmax(-1), scores.shape[-1], scores.dtype)


def tensor_statistics(theta: Parameters, settings: LossSettings) -> Tensor:
    """mean, deviation, L1 and L2 norm of each adapted tensor, in order: [4 * tensors]"""
    rows = []
    for tensor in theta.values():
        spread = tensor.var(correction=min(1, tensor.numel() - 1))  # unbiased, but 0 for a single number
        mean, deviation = tensor.mean(), (spread + EPS).sqrt()
        l1, l2 = tensor.abs().sum(), (tensor.square().sum() + EPS).sqrt()
        if settings.averaged:
            l1, l2 = l1 / tensor.numel(), l2 / tensor.numel() ** 0.5
        if settings.statistics == "reference":
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
