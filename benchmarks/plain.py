"""npbml's networks in plain torch, for the libraries that npbml is measured against.

Modules and parameters are named as in npbml's learner, so that `take` gives them a learner's values.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npbml.learner.learner import Learner


class Film(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.generator = nn.Linear(inputs, 2 * outputs)

    def forward(self, u: Tensor, y: Tensor) -> Tensor:
        pooled = u.mean((2, 3)) if u.dim() == 4 else u
        gamma, beta = self.generator(pooled).chunk(2, 1)
        if y.dim() == 4:
            gamma, beta = gamma[:, :, None, None], beta[:, :, None, None]
        return (1 + gamma) * y + beta


class Unit(nn.Module):
    """Convolution, batch norm, modulation"""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, film: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=bias)
        self.norm = nn.BatchNorm2d(outputs, track_running_stats=False)
        self.film = Film(inputs, outputs) if film else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        return y if self.film is None else self.film(x, y)


class Warp(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.omega = nn.Parameter(torch.empty(channels, channels, 3, 3))
        self.norm = nn.BatchNorm2d(channels, track_running_stats=False)
        self.film = Film(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.film(x, self.norm(F.conv2d(x, self.omega, padding=1)))


class ConvBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, last: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.unit = Unit(inputs, outputs, film=last, bias=bias)
        self.warp = Warp(outputs) if last else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.relu(self.unit(x)), 2)
        return y if self.warp is None else self.warp(y)


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, last: bool = False) -> None:
        super().__init__()
        self.units = nn.ModuleList(Unit(i, outputs, film=last) for i in (inputs, outputs, outputs))
        self.shortcut = Unit(inputs, outputs, kernel=1)
        self.warp = Warp(outputs) if last else None

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.units
        y = third(F.leaky_relu(second(F.leaky_relu(first(x), 0.01)), 0.01))
        if self.warp is not None:
            y = self.warp(y)
        return F.max_pool2d(F.leaky_relu(y + self.shortcut(x), 0.01), 2)


class Blocks(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class Network(nn.Module):
    def __init__(self, stem: list[nn.Module], tail: list[nn.Module]) -> None:
        super().__init__()
        self.stem, self.tail = Blocks(stem), Blocks(tail)

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.stem(x))


class NpbmlClassifier(nn.Module):
    """NPBML's network, as published: three frozen blocks, one that is modulated and warped, one row of a head."""

    def __init__(self, backbone: str, widths: list[int]) -> None:
        super().__init__()
        kind = ConvBlock if backbone == "conv4" else ResidualBlock
        blocks = [kind(i, o, last=n == 3) for n, (i, o) in enumerate(zip([3, *widths], widths, strict=False))]
        self.network, self.head = Network(blocks[:3], blocks[3:]), nn.Linear(widths[-1], 1)

    def forward(self, x: Tensor) -> Tensor:
        # By parts: the head of a task has more rows than the layer was made with.
        return F.linear(self.network(x).mean((2, 3)), self.head.weight, self.head.bias)


class MamlClassifier(nn.Module):
    """MAML's network, as published: four blocks with biases, flattened, and a linear head."""

    def __init__(self, filters: int, size: int, ways: int) -> None:
        super().__init__()
        blocks: list[nn.Module] = [ConvBlock(i, filters, bias=True) for i in (3, filters, filters, filters)]
        self.network, self.head = Network([], blocks), nn.Linear(filters * (size // 16) ** 2, ways)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.network(x).flatten(1))


class LossNetwork(nn.Module):
    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        sizes = [(inputs, hidden), (hidden, hidden), (hidden, 1)]
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in sizes)
        self.films = nn.ModuleList(Film(i, o) for i, o in sizes)

    def forward(self, x: Tensor) -> Tensor:
        for index, (layer, film) in enumerate(zip(self.layers, self.films, strict=True)):
            y = film(x, layer(x))
            x = F.relu(y) if index < 2 else y
        return x.mean()


class LossNetworks(nn.Module):
    """The three learned terms of NPBML's loss, beside cross-entropy"""

    def __init__(self, ways: int, tensors: int, hidden: int) -> None:
        """`loss.averaged`: over the millions of weights of a block, sums would make every step diverge."""
        super().__init__()
        self.inductive = LossNetwork(2 * ways + 1, hidden)
        self.transductive = LossNetwork(2 * ways + 1, hidden)
        self.regulariser = LossNetwork(4 * tensors, hidden)

    def forward(self, logits: Tensor, labels: Tensor, scores: Tensor, theta: list[Tensor]) -> Tensor:
        """logits of support and query items, labels of the support, scores of the query"""
        support, query = logits[: len(labels)], logits[len(labels) :]
        base = F.cross_entropy(support, labels, reduction="none")
        guessed = F.cross_entropy(query, scores.argmax(1), reduction="none")
        targets = F.one_hot(labels, logits.shape[1]).to(logits.dtype)
        statistics = [
            statistic
            for tensor in theta
            for statistic in (
                tensor.mean(),
                (tensor.var() + 1e-12).sqrt(),
                tensor.abs().mean(),
                (tensor.pow(2).sum() + 1e-12).sqrt() / tensor.numel() ** 0.5,
            )
        ]
        return (
            base.mean()
            + self.inductive(torch.cat([support, targets, base[:, None]], 1))
            + self.transductive(torch.cat([query, scores, guessed[:, None]], 1))
            + self.regulariser(torch.stack(statistics)[None])
        )


def take(module: nn.Module, learner: Learner, prefix: str = "") -> None:
    """Copy every value from the learner, and freeze what it freezes."""
    values = learner.state_dict()
    module.load_state_dict({name: values[prefix + name] for name in module.state_dict()})
    learned = dict(learner.named_parameters())
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(prefix + name in learned)
