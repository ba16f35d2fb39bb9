"""The backbone's settings, and the sizes that follow from them; torch is not needed for either."""

from dataclasses import dataclass
from typing import Literal

from npbml.parts import BACKBONES
from npbml.settings import setting

Statistics = Literal["batch", "running"]
WarpPosition = Literal["after_pool", "pre_activation", "before_addition", "after_block", "pre_norm"]


@dataclass(frozen=True)
class NetworkSettings:
    """The backbone's size and how it normalises."""

    filters: int = setting(128, low=1, high=10**6)
    """Filters of each of the four blocks of conv4, units of each of the two layers of mlp, or the numbers to which
    the tail of an encoder reduces its features."""
    widths: tuple[int, ...] | None = setting(None, low=1, high=10**6)
    """Filters of the blocks of a resnet12, or of the groups of wrn28-10; by default the backbone's own."""
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
    task_mean: float | None = setting(None, low=0)
    """Of an encoder: shift the features of a task so that the mean of its class means comes closer to that of
    training, by the share ways / (ways + this): tasks of another domain have another mean. None: no shift."""
    per_step_norm: bool = setting(False)
    """A scale and shift of batch norm for each inner step, meta-learned (MAML++); needs affine=meta."""


def block_widths(backbone: str, settings: NetworkSettings) -> tuple[int, ...]:
    """Channels that each block of a built-in backbone puts out, from the first to the last."""
    widths = BACKBONES.fact(backbone, "widths")
    if widths is None:
        return (settings.filters,) * BACKBONES.fact(backbone, "blocks")
    widths = widths if settings.widths is None else settings.widths
    return tuple(width for width in widths for _ in range(BACKBONES.fact(backbone, "group")))


def block_count(backbone: str, settings: NetworkSettings) -> int:
    """Blocks of the backbone: the units in which it is frozen."""
    if BACKBONES.fact(backbone, "widths") is None:
        return BACKBONES.fact(backbone, "blocks")
    return len(block_widths(backbone, settings))


def frozen_blocks(backbone: str, settings: NetworkSettings) -> int:
    """Blocks in the stem."""
    if settings.frozen_blocks is not None:
        return settings.frozen_blocks
    return block_count(backbone, settings) - 1 if BACKBONES.fact(backbone, "frozen") else 0


def smallest_image(backbone: str, settings: NetworkSettings) -> int:
    """The least side of an image that the backbone takes."""
    smallest = BACKBONES.fact(backbone, "smallest")
    halvings = block_count(backbone, settings) - BACKBONES.fact(backbone, "blocks")
    return smallest if BACKBONES.fact(backbone, "group") > 1 else max(1, int(smallest * 2**halvings))
