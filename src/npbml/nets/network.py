"""A backbone: a stem that stays frozen in meta-learning and a tail that adapts to the task."""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from npbml.errors import SettingError
from npbml.nets.layers import (
    Activation,
    ConvBlock,
    ConvUnit,
    Film,
    Norm,
    NormUnit,
    ResidualBlock,
    Statistics,
    Warp,
    WarpPosition,
    WideBlock,
)
from npbml.settings import setting

Backbone = Literal["conv4", "resnet12", "resnet12-wide", "wrn28-10", "mlp"]
RESNETS = ("resnet12", "resnet12-wide")  # the paper's, and the one that most others compare with

WARP_POSITIONS: dict[str, tuple[WarpPosition, ...]] = {  # the first is the default
    "conv4": ("after_pool", "pre_activation", "pre_norm"),
    **dict.fromkeys(RESNETS, ("before_addition", "after_block", "pre_norm")),
    "wrn28-10": ("before_addition", "after_block"),
    "mlp": ("after_pool", "pre_activation", "pre_norm"),
}
WIDTHS = {
    "resnet12": (64, 128, 256, 512),
    "resnet12-wide": (64, 160, 320, 640),
    "wrn28-10": (160, 320, 640),
}
WRN_ENTRY = 16  # channels between the first convolution of wrn28-10 and its first group
ACTIVATIONS: dict[str, Activation] = {
    "relu": F.relu,
    "leaky_relu": partial(F.leaky_relu, negative_slope=0.01),
    "softplus": F.softplus,
}


@dataclass(frozen=True)
class NetworkSettings:
    """The backbone's size and how it normalises."""

    filters: int = setting(128, low=1)
    """Filters of each of the four blocks of conv4, or units of each of the two layers of mlp."""
    widths: tuple[int, ...] | None = setting(None, low=1)
    """Filters of the blocks of a resnet12, or of the groups of wrn28-10; by default the backbone's own."""
    group_blocks: int = setting(4, low=1)
    """Blocks in a group of wrn28-10; 4 make its 28 layers."""
    frozen_blocks: int | None = setting(None, low=0)
    """Blocks in the stem, frozen in both loops; the others adapt. By default all but the last (none of mlp)."""
    bias: bool = setting(False)
    """Convolutions have biases, as MAML's own; those of mlp always have."""
    activation: Literal["auto", "relu", "leaky_relu", "softplus"] = setting("auto")
    """Non-linearity; auto is relu, but leaky_relu (slope 0.01) in a resnet12."""
    embedding: Literal["mean", "flatten"] = setting("mean")
    """How the last block's map becomes an embedding: averaged over space, or flattened."""
    final_norm: bool = setting(False)
    """Batch norm after the last block, whatever warps stand in it: embeddings are centred and of one scale."""
    stem_norm: Statistics = setting("batch")
    """Batch norm of the stem in meta-learning: statistics of the batch, or the running ones of pre-training."""
    tail_norm: Statistics = setting("batch")
    """Batch norm of the tail in meta-learning: statistics of the batch, or the running ones of pre-training."""
    affine: Literal["pretrained", "identity", "meta", "inner"] = setting("pretrained")
    """Batch norm's scale and shift: as pre-trained, 1 and 0, meta-learned, or adapted in the inner loop too."""
    per_step_norm: bool = setting(False)
    """A scale and shift of batch norm for each inner step, meta-learned (MAML++); needs affine=meta."""


def block_widths(backbone: Backbone, settings: NetworkSettings) -> tuple[int, ...]:
    """Channels that each block of the backbone puts out, from the first to the last."""
    if backbone in ("conv4", "mlp"):
        return (settings.filters,) * (4 if backbone == "conv4" else 2)
    widths = WIDTHS[backbone] if settings.widths is None else settings.widths
    repeats = settings.group_blocks if backbone == "wrn28-10" else 1
    return tuple(width for width in widths for _ in range(repeats))


def block_count(backbone: Backbone, settings: NetworkSettings) -> int:
    """Blocks of the backbone: the units in which it is frozen."""
    return len(block_widths(backbone, settings))


def frozen_blocks(backbone: Backbone, settings: NetworkSettings) -> int:
    """Blocks in the stem."""
    if settings.frozen_blocks is not None:
        return settings.frozen_blocks
    return 0 if backbone == "mlp" else block_count(backbone, settings) - 1


def smallest_image(backbone: Backbone, settings: NetworkSettings) -> int:
    """The least side of an image that leaves the last block's map a pixel, or enough of them to speak of."""
    return {"mlp": 1, "wrn28-10": 8}.get(backbone, 2 ** block_count(backbone, settings))


def last_side(backbone: Backbone, settings: NetworkSettings, size: int) -> int:
    """Side of the last block's map for images of side `size`."""
    blocks = block_count(backbone, settings)
    if backbone == "mlp":
        return size
    if backbone == "wrn28-10":
        return -(-size // 2 ** (blocks // settings.group_blocks - 1))  # strides round up, once in each later group
    return size // 2**blocks  # pooling rounds down


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
    """features of the stem -> embeddings [n, width], averaged over space or flattened.

    `fixed` holds the modulations of a task that are computed once and kept (see FiLM).
    """

    def __init__(self, blocks: list[nn.Module], norm: Norm | None = None, flatten: bool = False) -> None:
        super().__init__(blocks)
        self.norm, self.flatten = norm, flatten

    def forward(self, x: Tensor, fixed: dict[Any, Any] | None = None) -> Tensor:
        y = super().forward(x, fixed)
        if self.norm is not None:
            y = self.norm(y)
        return y.flatten(1) if self.flatten else y.mean((2, 3))


class Network(nn.Module):
    """The encoder z of Equation 10, as stem and tail."""

    def __init__(self, stem: Stem, tail: Tail, width: int) -> None:
        super().__init__()
        self.stem, self.tail, self.width = stem, tail, width

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
    size: int | None = None,
    warp_everywhere: bool = False,
) -> Network:
    """The backbone with the rule's parts, `film` and `warp`, in its last block (docs/method.md).

    With `warp_everywhere` every block of the tail is warped. `size`, the side of the images, decides the width of
    flattened embeddings. `film_shortcut` is for a resnet12, the only one with a batch norm in its shortcut.
    """
    kind = settings.activation
    if kind == "auto":
        kind = "leaky_relu" if backbone in RESNETS else "relu"
    activation, widths = ACTIVATIONS[kind], block_widths(backbone, settings)
    frozen, last = frozen_blocks(backbone, settings), len(widths) - 1
    entry = WRN_ENTRY if backbone == "wrn28-10" else channels
    blocks: list[nn.Module] = []
    for index, (inputs, outputs) in enumerate(pairwise((entry, *widths))):
        parts: dict[str, Any] = {
            "bias": settings.bias or backbone == "mlp",
            "film": film if index == last else None,
            "warp": warp if index == last or (warp_everywhere and index >= frozen) else None,
            "warp_position": warp_position or WARP_POSITIONS[backbone][0],
        }
        if backbone == "conv4":
            blocks.append(ConvBlock(inputs, outputs, activation, **parts))
        elif backbone == "mlp":
            blocks.append(ConvBlock(inputs, outputs, activation, kernel=1, norm=False, pool=False, **parts))
        elif backbone in RESNETS:
            blocks.append(ResidualBlock(inputs, outputs, activation, film_shortcut=film_shortcut, **parts))
        else:
            halves = index > 0 and index % settings.group_blocks == 0
            blocks.append(WideBlock(inputs, outputs, activation, stride=2 if halves else 1, **parts))
    if backbone == "wrn28-10":
        blocks[0] = Stem([ConvUnit(channels, WRN_ENTRY, bias=settings.bias, norm=False), blocks[0]])
        blocks[-1] = Stem([blocks[-1], NormUnit(widths[-1], activation, film)])

    width, flatten = widths[-1], settings.embedding == "flatten"
    if flatten:
        if size is None:
            raise SettingError("net.embedding=flatten has a width for each size of images: give the size.")
        width *= last_side(backbone, settings, size) ** 2
    norm = Norm(widths[-1]) if settings.final_norm else None
    return Network(Stem(blocks[:frozen]), Tail(blocks[frozen:], norm, flatten), width)
