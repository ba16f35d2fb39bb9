"""The meta-learned optimiser: linear projections omega in the network warp the gradient (Equations 8 and 9).

For f(x) = omega theta x, a step on theta moves the composed map by (omega omega^T) times its gradient: the
preconditioner is not applied to anything, it is there because omega stands in the forward pass and is fixed
inside a task. A non-linear warp Omega (WarpGrad) does the same to first order, with its derivative in omega's
place: D D^T, where D = dOmega at the activations at hand. That preconditioner depends on the data.
"""

from typing import Any

import torch
from torch import Tensor, nn

from npbml.nets.layers import Film, Norm
from npbml.rule.settings import WarpSettings


class Warp(nn.Module):
    """A convolution, its activation, batch norm, modulation: the warp unit.

    Parts other than the convolution are there if the settings or `film` say so. It starts as the identity.
    """

    def __init__(self, channels: int, settings: WarpSettings, film: Film | None = None) -> None:
        super().__init__()
        self.omega = nn.Parameter(torch.zeros(channels, channels, settings.kernel, settings.kernel))
        nn.init.dirac_(self.omega)
        self.bias = nn.Parameter(torch.zeros(channels)) if settings.bias else None
        self.norm = Norm(channels) if settings.norm else None
        self.film = film(channels, channels) if film else None
        self.nonlinear = settings.activation == "relu"

    def forward(self, u: Tensor, fixed: dict[Any, Any] | None = None) -> Tensor:
        y = nn.functional.conv2d(u, self.omega, self.bias, padding=self.omega.shape[-1] // 2)
        if self.nonlinear:
            y = y.clamp(min=0)  # relu, but its slope at 0 is 1: with a slope of 0, no zero omega could ever learn
        if self.norm is not None:
            y = self.norm(y)
        return y if self.film is None else self.film(u, y, fixed)
