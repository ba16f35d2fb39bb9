"""The classification head h: how a task's classes start."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npbml.rule.settings import HeadSettings


class Head(nn.Module):
    """Rows of weights and biases, from which a task's head starts: as many as `rows` says.

    With a warp, a matrix T that starts as the identity multiplies the logits (T-Net). A subclass states whether it
    has a row for each class (`fixes_ways`), and whether all classes start alike (`alike`).
    """

    fixes_ways = alike = False

    def __init__(self, width: int, outputs: int, settings: HeadSettings, warp: bool = False) -> None:
        super().__init__()
        rows = self.rows(outputs)
        self.weight = nn.Parameter(torch.zeros(rows, width))
        self.bias = nn.Parameter(torch.zeros(rows))
        self.warp = nn.Parameter(torch.eye(outputs)) if warp else None
        self.carry_gradient, self.centred = settings.copy == "expand", settings.centred

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
        logits = F.linear(embeddings, weight, bias)
        return logits if self.warp is None else F.linear(logits, self.warp)


class UnicornHead(Head):
    """One vector, copied to every class (Ye and Chao, 2022)."""

    alike = True

    def rows(self, outputs: int) -> int:
        return 1


class LinearHead(Head):
    """A row of its own for each class."""

    fixes_ways = True
