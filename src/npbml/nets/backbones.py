"""The backbones: each makes the blocks of a network, from the first to the last, as a plan says.

A user's own backbone is a function of the image's channels that returns blocks, modules that map feature maps
[n, channels, height, width] to feature maps. FiLM and warp are put behind its last block:

    @npbml.register_backbone("vgg", blocks=3)
    def vgg(channels):
        return [my_block(channels, 32), my_block(32, 64), my_block(64, 64)]

Batch normalisation in such blocks is `npbml.Norm`, whose mode is explicit.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from npbml.errors import SettingError
from npbml.nets.layers import (
    Activation,
    Chain,
    ConvBlock,
    ConvUnit,
    Film,
    NormUnit,
    ResidualBlock,
    Warp,
    WideBlock,
)
from npbml.nets.settings import NetworkSettings, WarpPosition, block_widths
from npbml.parts import BACKBONES

WRN_ENTRY = 16  # channels between the first convolution of wrn28-10 and its first group


class Plan(NamedTuple):
    """What the blocks of a network are made from."""

    backbone: str
    channels: int
    settings: NetworkSettings
    activation: Activation
    film: Film | None
    film_shortcut: bool
    warp: Warp | None
    warp_position: WarpPosition
    first_warped: int | None  # the block from which on all are warped; None: the last alone
    size: int | None  # of the images

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of each block of a built-in backbone."""
        return block_widths(self.backbone, self.settings)

    def last_width(self, blocks: Sequence[nn.Module]) -> int:
        """Channels of the last block's map."""
        return blocks[-1].width if isinstance(blocks[-1], OwnBlock) else self.widths[-1]

    def parts(self, index: int, bias: bool = False) -> dict[str, Any]:
        """What block `index` has of the rule, and whether its layers have biases."""
        last = index == len(self.widths) - 1
        warped = last or (self.first_warped is not None and index >= self.first_warped)
        return {
            "bias": self.settings.bias or bias,
            "film": self.film if last else None,
            "warp": self.warp if warped else None,
            "warp_position": self.warp_position,
        }

    def sides(self, entry: int | None = None) -> list[tuple[int, int]]:
        """Channels in and out of each block."""
        return list(pairwise((entry or self.channels, *self.widths)))


def conv4(plan: Plan) -> list[nn.Module]:
    """4-CONV: four blocks of convolution, batch norm, activation and pooling."""
    return [ConvBlock(i, o, plan.activation, **plan.parts(n)) for n, (i, o) in enumerate(plan.sides())]


def mlp(plan: Plan) -> list[nn.Module]:
    """Fully connected layers, on images of one pixel."""
    return [
        ConvBlock(i, o, plan.activation, kernel=1, norm=False, pool=False, **plan.parts(n, bias=True))
        for n, (i, o) in enumerate(plan.sides())
    ]


def resnet12(plan: Plan) -> list[nn.Module]:
    """ResNet-12: residual blocks of three convolutions."""
    shortcut = plan.film_shortcut
    return [
        ResidualBlock(i, o, plan.activation, film_shortcut=shortcut, **plan.parts(n))
        for n, (i, o) in enumerate(plan.sides())
    ]


def wrn28_10(plan: Plan) -> list[nn.Module]:
    """WRN-28-10: groups of wide blocks; each group but the first halves the map."""
    group, blocks = BACKBONES.fact(plan.backbone, "group"), list[nn.Module]()
    for n, (i, o) in enumerate(plan.sides(WRN_ENTRY)):
        halves = n > 0 and n % group == 0
        blocks.append(WideBlock(i, o, plan.activation, stride=2 if halves else 1, **plan.parts(n)))
    entry = ConvUnit(plan.channels, WRN_ENTRY, bias=plan.settings.bias, norm=False)
    blocks[0] = Chain([entry, blocks[0]])
    blocks[-1] = Chain([blocks[-1], NormUnit(plan.widths[-1], plan.activation, plan.film)])
    return blocks


class OwnBlock(nn.Module):
    """A block of a user's own backbone; the last one has FiLM and the warp behind it."""

    def __init__(self, block: nn.Module, inputs: int, width: int, film: Film | None, warp: Warp | None) -> None:
        super().__init__()
        self.block, self.width = block, width
        self.film = film(inputs, width) if film else None
        self.warp = warp(width) if warp else None

    def forward(self, u: Tensor, fixed: dict[Any, Any] | None = None) -> Tensor:
        y = self.block(u)
        if self.film is not None:
            y = self.film(u, y, fixed)
        return y if self.warp is None else self.warp(y, fixed)


def register_backbone(name: str, blocks: int, summary: str = "", smallest: int = 1) -> Callable[[Any], Any]:
    """A decorator that registers a function of the image's channels as the backbone `name`.

    Args:
        name: By which settings and commands know it.
        blocks: How many blocks the function returns. All but the last are frozen in meta-learning.
        summary: A line for lists; the function's docstring if not given.
        smallest: The least side of an image that it takes.
    """

    def add(make: Callable[[int], Sequence[nn.Module]]) -> Callable[[int], Sequence[nn.Module]]:
        def build(plan: Plan) -> list[nn.Module]:
            made = list(make(plan.channels))
            if len(made) != blocks:
                raise SettingError(
                    f"The backbone {name} returned {len(made)} blocks, and was registered with {blocks}."
                )
            return _own_blocks(made, plan)

        about = summary or (make.__doc__ or "").strip().partition("\n")[0]
        BACKBONES.register(name, build, about, blocks=blocks, smallest=smallest)
        return make

    return add


def _own_blocks(blocks: list[nn.Module], plan: Plan) -> list[nn.Module]:
    """The user's blocks, whose channels are found by showing them two empty images."""
    made: list[nn.Module] = []
    seen = torch.zeros(2, plan.channels, plan.size or 32, plan.size or 32)
    for number, block in enumerate(blocks):
        inputs = seen.shape[1]
        try:
            with torch.no_grad():
                seen = block(seen)
        except RuntimeError as error:
            raise SettingError(
                f"Block {number + 1} of {plan.backbone} cannot take {list(seen.shape)}: {error}"
            ) from None
        if seen.dim() != 4:
            raise SettingError(
                f"Block {number + 1} of {plan.backbone} gives {list(seen.shape)}, and not a map "
                "[n, channels, height, width]."
            )
        last = number == len(blocks) - 1
        warped = last or (plan.first_warped is not None and number >= plan.first_warped)
        film, warp = plan.film if last else None, plan.warp if warped else None
        made.append(OwnBlock(block, inputs, seen.shape[1], film, warp))
    return made
