"""A network: a stem that stays frozen in meta-learning and a tail that adapts to the task."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npbml.errors import SettingError
from npbml.nets.backbones import Plan
from npbml.nets.layers import Activation, Chain, Film, Norm, Warp
from npbml.nets.settings import NetworkSettings, WarpPosition, frozen_blocks
from npbml.parts import BACKBONES

ACTIVATIONS: dict[str, Activation] = {
    "relu": F.relu,
    "leaky_relu": partial(F.leaky_relu, negative_slope=0.01),
    "softplus": F.softplus,
}


class Stem(Chain):
    """images [n, channels, height, width] -> features [n, filters, h, w]"""


class Tail(Chain):
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
    backbone: str,
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
    kind, frozen = settings.activation, frozen_blocks(backbone, settings)
    activation = ACTIVATIONS[BACKBONES.fact(backbone, "activation") if kind == "auto" else kind]
    position = warp_position or BACKBONES.fact(backbone, "warp_positions")[0]
    first_warped = frozen if warp_everywhere else None
    plan = Plan(backbone, channels, settings, activation, film, film_shortcut, warp, position, first_warped, size)
    blocks = BACKBONES.get(backbone)(plan)
    flatten = settings.embedding == "flatten"
    if flatten and size is None:
        raise SettingError("net.embedding=flatten has a width for each size of images: give the size.")
    tail = blocks[frozen:]
    norm = Norm(plan.last_width(blocks)) if settings.final_norm else None
    network = Network(Stem(blocks[:frozen]), Tail(tail, norm, flatten), plan.last_width(blocks))
    if flatten and size is not None:
        with torch.no_grad():
            network.width = network(torch.zeros(2, channels, size, size)).shape[1]
    return network
