"""The classification head h: how a task's classes start."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npbml.rule.pairs import mix_classes
from npbml.rule.settings import HeadSettings


class Head(nn.Module):
    """Rows of weights and biases, from which a task's head starts: as many as `rows` says.

    With a warp, a matrix T that starts as the identity multiplies the logits (T-Net). A subclass states whether it
    has a row for each class (`fixes_ways`), and whether all classes start alike (`alike`).

    Without a number of `outputs` it is for any number of classes: it has one row, and T = a I + (b / ways) 11^T.
    """

    fixes_ways = alike = False

    def __init__(self, width: int, outputs: int | None, settings: HeadSettings, warp: bool = False) -> None:
        super().__init__()
        rows = 1 if outputs is None else self.rows(outputs)
        self.weight = nn.Parameter(torch.zeros(rows, width))
        self.bias = nn.Parameter(torch.zeros(rows))
        self.warp: nn.Parameter | None = None
        if warp:
            self.warp = nn.Parameter(torch.tensor([1.0, 0.0]) if outputs is None else torch.eye(outputs))
        self.carry_gradient, self.centred = settings.copy == "expand", settings.centred
        self.normalised = settings.normalised

    def rows(self, outputs: int) -> int:
        """How many rows it has."""
        return outputs

    def start(self, outputs: int) -> tuple[Tensor, Tensor]:
        """The head of a task at theta_0: weight [outputs, width] and bias [outputs]."""
        weight, bias = self.weight.expand(outputs, -1), self.bias.expand(outputs)
        return (weight, bias) if self.carry_gradient else (weight.detach(), bias.detach())

    def forward(self, embeddings: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """embeddings [n, width] -> logits [n, outputs], by the weight and bias of a task"""
        if self.centred:
            embeddings = embeddings - embeddings.mean(0)
        if self.normalised:
            embeddings = embeddings.shape[-1] ** 0.5 * F.normalize(embeddings, dim=-1, eps=1e-6)
        logits = F.linear(embeddings, weight, bias)
        if self.warp is None:
            return logits
        return F.linear(logits, self.warp) if self.warp.dim() == 2 else mix_classes(self.warp, logits, -1)


class UnicornHead(Head):
    """One vector, copied to every class (Ye and Chao, 2022)."""

    alike = True

    def rows(self, outputs: int) -> int:
        return 1


class LinearHead(Head):
    """A row of its own for each class."""

    fixes_ways = True
