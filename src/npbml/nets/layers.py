"""The layers that every network is made of."""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Statistics = Literal["batch", "running"]
Film = Callable[[int, int], nn.Module]  # (channels in, channels out) -> a module (u, y, fixed) -> y
Warp = Callable[[int], nn.Module]  # channels -> a module (y, fixed) -> y
Activation = Callable[[Tensor], Tensor]


class Norm(nn.Module):
    """Batch normalisation whose mode is explicit: nobody has to guess what `train()` and `eval()` do to it.

    mode "track"    normalise by the batch and update the running averages (pre-training)
    mode "batch"    normalise by the batch, keep no state (docs/method.md, item 1)
    mode "running"  normalise by the running averages, so that items do not see each other
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.eps, self.momentum = eps, momentum
        self.mode: Literal["track", "batch", "running"] = "batch"

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "batch":
            return F.batch_norm(x, None, None, self.weight, self.bias, training=True, eps=self.eps)
        track = self.mode == "track"
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, track, self.momentum, self.eps
        )


def set_norm(module: nn.Module, mode: Literal["track", "batch", "running"]) -> None:
    """Put every batch normalisation below `module` into one mode."""
    for part in module.modules():
        if isinstance(part, Norm):
            part.mode = mode


class ConvUnit(nn.Module):
    """A bias-free convolution, batch normalisation and, where the rule puts one, its modulation."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, film: Film | None = None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
        self.norm = Norm(outputs)
        self.film = film(inputs, outputs) if film else None

    def forward(self, u: Tensor, fixed: dict[Any, Any] | None = None) -> Tensor:
        y = self.norm(self.conv(u))
        return y if self.film is None else self.film(u, y, fixed)


class ResidualBlock(nn.Module):
    """Three convolutions beside a 1x1 shortcut, then activation and pooling (docs/method.md).

    `warp` stands before the addition with the shortcut, or after the whole block.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        activation: Activation,
        pool: bool = True,
        film: Film | None = None,
        film_shortcut: bool = False,
        warp: Warp | None = None,
        warp_after_block: bool = False,
    ) -> None:
        super().__init__()
        self.units = nn.ModuleList(ConvUnit(i, outputs, film=film) for i in (inputs, outputs, outputs))
        self.shortcut = ConvUnit(inputs, outputs, kernel=1, film=film if film_shortcut else None)
        self.warp = warp(outputs) if warp else None
        self.activation, self.pool, self.warp_after_block = activation, pool, warp_after_block

    def forward(self, u: Tensor, fixed: dict[Any, Any] | None = None) -> Tensor:
        first, second, third = self.units
        y = self.activation(first(u, fixed))
        y = self.activation(second(y, fixed))
        y = third(y, fixed)
        if self.warp is not None and not self.warp_after_block:
            y = self.warp(y, fixed)
        y = self.activation(y + self.shortcut(u, fixed))
        if self.pool:
            y = F.max_pool2d(y, 2)
        if self.warp is not None and self.warp_after_block:
            y = self.warp(y, fixed)
        return y


def freeze(module: nn.Module) -> nn.Module:
    """Turn every parameter below `module` into a buffer: it is saved and moved with the module, but no
    optimiser and no gradient sees it."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            delattr(part, name)
            part.register_buffer(name, parameter.detach().clone())
    return module


def initialise(module: nn.Module, std: float, generator: torch.Generator, uniform_bias: bool = False) -> None:
    """Weights of every convolution and linear layer ~ N(0, std^2); biases 0, or torch's uniform default."""
    for part in module.modules():
        if isinstance(part, (nn.Conv2d, nn.Linear)):
            with torch.no_grad():
                part.weight.normal_(0.0, std, generator=generator)
                if part.bias is not None:
                    bound = part.weight[0].numel() ** -0.5 if uniform_bias else 0.0
                    part.bias.uniform_(-bound, bound, generator=generator)
