"""The classification head h: how a task's classes start."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from npbml.settings import setting


@dataclass(frozen=True)
class HeadSettings:
    """The classification head."""

    kind: Literal["unicorn", "linear"] = setting("unicorn")
    """unicorn: one vector copied to every class; linear: a row of its own for each class slot."""
    copy: Literal["expand", "value"] = setting("expand")
    """expand: the copy carries gradient to the vector; value: it does not (docs/method.md, item 13)."""


class Head(nn.Module):
    """One row (unicorn) or `ways` rows (linear) of weights and biases."""

    def __init__(self, width: int, rows: int = 1, carry_gradient: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, width))
        self.bias = nn.Parameter(torch.zeros(rows))
        self.carry_gradient = carry_gradient

    def start(self, ways: int) -> tuple[Tensor, Tensor]:
        """The head of a task at theta_0: weight [ways, width] and bias [ways]."""
        weight, bias = self.weight.expand(ways, -1), self.bias.expand(ways)
        return (weight, bias) if self.carry_gradient else (weight.detach(), bias.detach())
