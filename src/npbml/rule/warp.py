"""The meta-learned optimiser: linear projections omega in the network warp the gradient (Equations 8 and 9).

For f(x) = omega theta x, a step on theta moves the composed map by (omega omega^T) times its gradient: the
preconditioner is not applied to anything, it is there because omega stands in the forward pass and is fixed
inside a task. A non-linear warp Omega (WarpGrad) does the same to first order, with its derivative in omega's
place: D D^T, where D = dOmega at the activations at hand. That preconditioner depends on the data.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from npbml.nets.layers import Film, Norm, WarpPosition
from npbml.settings import setting


@dataclass(frozen=True)
class WarpSettings:
    """The warp preconditioner."""

    kind: Literal["learned", "fixed", "none"] = setting("learned")
    """Meta-learn omega, keep it at its Dirac start (the same network, P = I), or leave the unit out."""
    blocks: Literal["last", "all"] = setting("last")
    """Warp the last block, or every block of the tail (T-Net, WarpGrad)."""
    head: bool = setting(False)
    """A matrix on the logits as well (T-Net)."""
    position: Literal["auto", WarpPosition] = setting("auto")
    """Where it stands; auto: after_pool in conv4 and mlp, before_addition in the residual ones (items 7 and 8).
    pre_norm is T-Net's: between every convolution and its batch norm."""
    kernel: Literal[1, 3] = setting(3)
    """Size of the warp's kernel (docs/method.md, item 9)."""
    bias: bool = setting(False)
    """A bias behind the kernel."""
    norm_in: bool = setting(False)
    """Batch normalisation before the warp (WarpGrad)."""
    activation: Literal["none", "relu"] = setting("none")
    """Non-linearity behind the kernel: with one, the preconditioner depends on the data (WarpGrad)."""
    residual: bool = setting(False)
    """Add the unit's input; omega then starts at zero, so that the unit still starts as the identity."""
    norm: bool = setting(True)
    """Batch normalisation after the warp (item 9)."""


class Warp(nn.Module):
    """Batch norm, a convolution, its activation, the unit's input, batch norm, modulation: the warp unit.

    Every part but the convolution is there if the settings or `film` say so. The convolution starts as the
    identity; beside a residual connection it starts at zero.
    """

    def __init__(self, channels: int, settings: WarpSettings, film: Film | None = None) -> None:
        super().__init__()
        self.omega = nn.Parameter(torch.zeros(channels, channels, settings.kernel, settings.kernel))
        if not settings.residual:
            nn.init.dirac_(self.omega)
        self.bias = nn.Parameter(torch.zeros(channels)) if settings.bias else None
        self.norm_in = Norm(channels) if settings.norm_in else None
        self.norm = Norm(channels) if settings.norm else None
        self.film = film(channels, channels) if film else None
        self.nonlinear, self.residual = settings.activation == "relu", settings.residual

    def forward(self, u: Tensor, fixed: dict[Any, Any] | None = None) -> Tensor:
        y = u if self.norm_in is None else self.norm_in(u)
        y = nn.functional.conv2d(y, self.omega, self.bias, padding=self.omega.shape[-1] // 2)
        if self.nonlinear:
            y = y.clamp(min=0)  # relu, but its slope at 0 is 1: with a slope of 0, no zero omega could ever learn
        if self.residual:
            y = y + u
        if self.norm is not None:
            y = self.norm(y)
        return y if self.film is None else self.film(u, y, fixed)
