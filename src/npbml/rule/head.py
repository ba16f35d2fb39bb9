"""The classification head h: how a task's classes start."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npbml.settings import setting


@dataclass(frozen=True)
class HeadSettings:
    """The classification head."""

    kind: Literal["unicorn", "linear"] = setting("unicorn")
    """unicorn: one vector copied to every class; linear: a row of its own for each class slot."""
    copy: Literal["expand", "value"] = setting("expand")
    """expand: the copy carries gradient to the vector; value: it does not (docs/method.md, item 13)."""
    centred: bool = setting(False)
    """The head sees embeddings less the mean of their batch. What all images have in common tells no class from
    another, but bounds the step that the inner loop can take."""


class Head(nn.Module):
    """One row (unicorn) or `outputs` rows (linear) of weights and biases.

    With a warp, a matrix T that starts as the identity multiplies the logits (T-Net).
    """

    def __init__(self, width: int, outputs: int, settings: HeadSettings, warp: bool = False) -> None:
        super().__init__()
        rows = 1 if settings.kind == "unicorn" else outputs
        self.weight = nn.Parameter(torch.zeros(rows, width))
        self.bias = nn.Parameter(torch.zeros(rows))
        self.warp = nn.Parameter(torch.eye(outputs)) if warp else None
        self.carry_gradient, self.centred = settings.copy == "expand", settings.centred

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
