"""SCA's critic C: a learned loss on the query logits alone, which needs no labels."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npbml.nets.layers import Norm, initialise
from npbml.rule.pairs import UNLABELLED, pair_inputs

BLOCKS, CHANNELS, HIDDEN = 5, 8, 16


class Critic(nn.Module):
    """C(z) = sum over the query items of c(r), r = [z, |z|, z*z, sign(z)] read as a signal of one channel.

    c: dense blocks i = 0..4 of a convolution dilated by 2^i, batch norm and ReLU, each on everything before it;
    then 16, ReLU, 16, ReLU, 1. The items see each other through the batch norm.
    """

    def __init__(self, ways: int) -> None:
        super().__init__()
        # No bias where a batch norm follows, which would take it away again.
        self.convs = nn.ModuleList(
            nn.Conv1d(1 + CHANNELS * i, CHANNELS, 3, padding=2**i, dilation=2**i, bias=False)
            for i in range(BLOCKS)
        )
        self.norms = nn.ModuleList(Norm(CHANNELS) for _ in range(BLOCKS))
        sizes = (4 * ways * (1 + CHANNELS * BLOCKS), HIDDEN, HIDDEN, 1)
        self.layers = nn.ModuleList(nn.Linear(i, o, bias=False) for i, o in pairwise(sizes))

    def forward(self, logits: Tensor) -> Tensor:
        """query logits [m, ways] -> their loss, a scalar"""
        x = torch.cat([logits, logits.abs(), logits * logits, logits.sign()], -1).unsqueeze(1)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = torch.cat([x, F.relu(norm(conv(x)))], 1)
        x = x.flatten(1)
        *hidden, last = self.layers
        for layer in hidden:
            x = F.relu(layer(x))
        return last(x).sum()

    def begin(self, std: float, generator: torch.Generator) -> None:
        """Weights ~ N(0, std^2), those of the two hidden linear layers ~ N(0, 1 / inputs)."""
        # A batch norm undoes the scale of a convolution, but nothing undoes that of a linear layer: with all three
        # at std = 0.01 the last one's meta-gradient is a hundredth of what it is here: it hardly learns.
        # The last layer alone keeps the first critic quiet: as the loss is a sum, its gradient in 75 query logits
        # is then about as long as that of their mean cross-entropy, one ordinary step.
        with torch.no_grad():
            for part in self.modules():
                if isinstance(part, (nn.Conv1d, nn.Linear)):
                    hidden = isinstance(part, nn.Linear) and part is not self.layers[-1]
                    scale = part.weight[0].numel() ** -0.5 if hidden else std
                    part.weight.normal_(0.0, scale, generator=generator)


class SymmetricCritic(nn.Module):
    """C(z) = (1 / m) sum_i sum_c c(x_ic), of each pair of a query item and a class: for any number of classes.

    x_ic is what the symmetric losses see of a pair (rule/pairs.py), but for label and loss: a query item has none.
    c: 16, ReLU, 16, ReLU, 1. The sum over items is a mean here, as there may be any number of them too.
    """

    def __init__(self, balanced: bool = False) -> None:
        super().__init__()
        self.balanced = balanced
        sizes = (UNLABELLED + balanced, HIDDEN, HIDDEN, 1)
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(sizes))

    def forward(self, logits: Tensor) -> Tensor:
        """query logits [m, ways] -> their loss, a scalar"""
        x = pair_inputs(logits, balanced=self.balanced)
        *hidden, last = self.layers
        for layer in hidden:
            x = F.relu(layer(x))
        return last(x).sum(1).mean()

    def begin(self, std: float, generator: torch.Generator) -> None:
        """Weights as those of `Critic`: hidden ones ~ N(0, 1 / inputs), the last ones ~ N(0, std^2); biases 0."""
        initialise(self, std, generator)
        for layer in list(self.layers)[:-1]:
            weight: Tensor = layer.weight  # type: ignore[assignment]
            nn.init.normal_(weight, 0.0, weight.shape[1] ** -0.5, generator)
