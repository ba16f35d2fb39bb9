"""A backbone: a stem that stays frozen in meta-learning and a tail that adapts to the task."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from npbml.nets.layers import Activation, ConvUnit, Film, ResidualBlock, Statistics, Warp
from npbml.settings import setting

Backbone = Literal["conv4", "resnet12"]
WarpPosition = Literal["after_pool", "pre_activation", "before_addition", "after_block"]

WARP_POSITIONS: dict[str, tuple[WarpPosition, ...]] = {
    "conv4": ("after_pool", "pre_activation"),
    "resnet12": ("before_addition", "after_block"),
}
ACTIVATIONS: dict[str, Activation] = {
    "relu": F.relu,
    "leaky_relu": partial(F.leaky_relu, negative_slope=0.01),
    "softplus": F.softplus,
}


@dataclass(frozen=True)
class NetworkSettings:
    """The backbone's size and how it normalises."""

    filters: int = setting(128, low=1)
    """Filters of each of the four blocks of conv4."""
    widths: tuple[int, ...] = setting((64, 128, 256, 512), low=1)
    """Filters of the blocks of resnet12."""
    frozen_blocks: int = setting(3, low=0, high=4)
    """Blocks in the stem, frozen in both loops; the others form the tail, which adapts."""
    activation: Literal["auto", "relu", "leaky_relu", "softplus"] = setting("auto")
    """Non-linearity; auto is the paper's: relu in conv4, leaky_relu (slope 0.01) in resnet12."""
    stem_norm: Statistics = setting("batch")
    """Batch norm of the stem in meta-learning: statistics of the batch, or the running ones of pre-training."""
    tail_norm: Statistics = setting("batch")
    """Batch norm of the tail in meta-learning: statistics of the batch, or the running ones of pre-training."""
    affine: Literal["pretrained", "identity"] = setting("pretrained")
    """Batch norm's scale and shift: trained in pre-training and frozen after, or kept at 1 and 0 throughout."""


class Conv4Block(nn.Module):
    """Convolution, batch norm, modulation, activation, 2x2 max pooling (docs/method.md)."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        activation: Activation,
        film: Film | None = None,
        warp: Warp | None = None,
        warp_pre_activation: bool = False,
    ) -> None:
        super().__init__()
        self.unit = ConvUnit(inputs, outputs, film=film)
        self.warp = warp(outputs) if warp else None
        self.activation, self.warp_pre_activation = activation, warp_pre_activation

    def forward(self, u: Tensor, fixed: dict[Any, Any] | None = None) -> Tensor:
        y = self.unit(u, fixed)
        if self.warp is not None and self.warp_pre_activation:
            y = self.warp(y, fixed)
        y = F.max_pool2d(self.activation(y), 2)
        if self.warp is not None and not self.warp_pre_activation:
            y = self.warp(y, fixed)
        return y


class Stem(nn.Module):
    """images [n, channels, height, width] -> features [n, filters, h, w]"""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, fixed: dict[Any, Any] | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, fixed)
        return x


class Tail(Stem):
    """features of the stem -> embeddings [n, width], averaged over space.

    `fixed` holds the modulations of a task that are computed once and kept (see FiLM).
    """

    def forward(self, x: Tensor, fixed: dict[Any, Any] | None = None) -> Tensor:
        return super().forward(x, fixed).mean((2, 3))


class Network(nn.Module):
    """The encoder z of Equation 10, as stem and tail."""

    def __init__(self, blocks: list[nn.Module], frozen_blocks: int, width: int) -> None:
        super().__init__()
        self.stem, self.tail = Stem(blocks[:frozen_blocks]), Tail(blocks[frozen_blocks:])
        self.width = width

    def forward(self, images: Tensor) -> Tensor:
        return self.tail(self.stem(images))


def build_network(
    backbone: Backbone,
    channels: int,
    settings: NetworkSettings,
    film: Film | None = None,
    film_shortcut: bool = False,
    warp: Warp | None = None,
    warp_position: WarpPosition | None = None,
) -> Network:
    """The backbone with the rule's parts, `film` and `warp`, in its last block (docs/method.md)."""
    widths = (settings.filters,) * 4 if backbone == "conv4" else settings.widths
    kind = settings.activation
    if kind == "auto":
        kind = "relu" if backbone == "conv4" else "leaky_relu"
    inputs = (channels, *widths)
    blocks: list[nn.Module] = []
    for index, width in enumerate(widths):
        last = index == len(widths) - 1
        parts: dict[str, Any] = {"film": film if last else None, "warp": warp if last else None}
        if backbone == "conv4":
            parts["warp_pre_activation"] = warp_position == "pre_activation"
            blocks.append(Conv4Block(inputs[index], width, ACTIVATIONS[kind], **parts))
        else:
            parts["warp_after_block"] = warp_position == "after_block"
            parts["film_shortcut"] = film_shortcut
            blocks.append(ResidualBlock(inputs[index], width, ACTIVATIONS[kind], **parts))
    return Network(blocks, settings.frozen_blocks, widths[-1])
