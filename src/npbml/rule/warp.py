"""The meta-learned optimiser: linear projections omega in the network warp the gradient (Equations 8 and 9).

For f(x) = omega theta x, a step on theta moves the composed map by (omega omega^T) times its gradient: the
preconditioner is not applied to anything, it is there because omega stands in the forward pass and is fixed
inside a task.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from npbml.nets.layers import Film, Norm
from npbml.settings import setting


@dataclass(frozen=True)
class WarpSettings:
    """The warp preconditioner."""

    kind: Literal["learned", "fixed", "none"] = setting("learned")
    """Meta-learn omega, keep it at its Dirac start (the same network, P = I), or leave the unit out."""
    kernel: Literal[1, 3] = setting(3)
    """Size of the warp's kernel (docs/method.md, item 9)."""
    norm: bool = setting(True)
    """Batch normalisation after the warp (item 9)."""
    position: Literal["auto", "after_pool", "pre_activation", "before_addition", "after_block"] = setting("auto")
    """Where it stands; auto: after_pool in conv4, before_addition in resnet12 (items 7 and 8)."""


class Warp(nn.Module):
    """A convolution that starts as the identity, batch norm, modulation: the warp unit."""

    def __init__(self, channels: int, kernel: int = 3, norm: bool = True, film: Film | None = None) -> None:
        super().__init__()
        self.omega = nn.Parameter(torch.empty(channels, channels, kernel, kernel))
        nn.init.dirac_(self.omega)
        self.norm = Norm(channels) if norm else None
        self.film = film(channels, channels) if film else None

    def forward(self, u: Tensor, fixed: dict[Any, Any] | None = None) -> Tensor:
        y = nn.functional.conv2d(u, self.omega, padding=self.omega.shape[-1] // 2)
        if self.norm is not None:
            y = self.norm(y)
        return y if self.film is None else self.film(u, y, fixed)
