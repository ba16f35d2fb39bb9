"""The augmentation of pre-training, on a whole batch at once, where the images are.

Random resized crop, colour jitter and horizontal flip as torchvision defines them. What is random is drawn
first, from one number; the rest is a function of images and draws.
"""

import math
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from npbml.data.settings import AugmentSettings
from npbml.data.tasks import ClassSet
from npbml.randomness import scattered, uniform

_RATIO = (3 / 4, 4 / 3)
_TRIES = 10
_LUMA = (0.2989, 0.587, 0.114)
_JITTER = 0.4  # brightness, contrast and saturation are each multiplied by 1 - jitter to 1 + jitter


class Variation(NamedTuple):
    """What is drawn for a batch of images; every field is [images] or [images, 3]."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor
    mirrored: Tensor
    order: Tensor
    """[images, 3]: which of brightness (0), contrast (1) and saturation (2) comes first, second and third."""
    factors: Tensor
    """[images, 3]: those of brightness, contrast and saturation."""


def augment(images: Tensor, settings: AugmentSettings, number: Tensor) -> Tensor:
    """Images uint8, or float in 0..1, [images, channels, height, width] to float32 in 0..1, varied."""
    count, _, height, width = images.shape
    return vary(images, draw_variation(count, height, width, settings, number))


def draw_variation(images: int, height: int, width: int, settings: AugmentSettings, number: Tensor) -> Variation:
    """The random part, drawn from a number, where that is: the same on every device, but for rounding.

    A crop's area, ratio and place are tried ten times, as torchvision does, but all at once: the first try
    that fits into the image is taken, and where none does, the largest crop in the middle whose ratio is
    allowed. The order of the jitter is drawn for each image.
    """

    draws = uniform(number, images, 2 * _TRIES + 9)
    areas, ratios, rest, places, factors = draws.split([_TRIES, _TRIES, 3, 3, 3], 1)
    down, right, mirror = rest.unbind(1)

    def between(low: float, high: float, draws: Tensor) -> Tensor:
        return low + (high - low) * draws

    area = height * width * between(settings.crop_scale_low, 1, areas)
    ratio = between(math.log(_RATIO[0]), math.log(_RATIO[1]), ratios).exp()
    wide, high = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
    fits = (wide >= 1) & (wide <= width) & (high >= 1) & (high <= height)
    first = fits.to(torch.uint8).argmax(1, keepdim=True)
    wide, high = wide.gather(1, first)[:, 0], high.gather(1, first)[:, 0]
    top, left = (down * (height - high + 1)).floor(), (right * (width - wide + 1)).floor()

    whole_width, whole_height = min(width, round(height * _RATIO[1])), min(height, round(width / _RATIO[0]))
    none = ~fits.any(1)
    wide, high = wide.masked_fill(none, whole_width), high.masked_fill(none, whole_height)
    top = top.masked_fill(none, (height - whole_height) // 2)
    left = left.masked_fill(none, (width - whole_width) // 2)

    mirrored = mirror < (0.5 if settings.flip else 0)
    factors = between(1 - _JITTER, 1 + _JITTER, factors)
    return Variation(top, left, high, wide, mirrored, places.argsort(1), factors)


def vary(images: Tensor, variation: Variation, size: int | None = None) -> Tensor:
    """Images uint8, or float in 0..1, [images, channels, height, width] to float32 in 0..1, as drawn.

    The crops get the size of the image, or sides of `size`.
    """
    unit = 255 if images.dtype == torch.uint8 else 1
    variation = Variation(*(field.to(images.device) for field in variation))
    crops = _crop(images.to(torch.float32) / unit, variation, size)
    return _jitter(crops, variation.order, variation.factors.float())


def _crop(images: Tensor, variation: Variation, size: int | None) -> Tensor:
    """Each crop, mirrored or not, at the size of the image or with sides of `size`, by bilinear sampling.

    A crop is never larger than the image, so that at the size of the image it is only ever enlarged and needs no
    filter. With sides of `size` a large one is shrunk, also without.
    """
    height, width = images.shape[-2:]
    y = _coordinates(variation.top, variation.height, height, size or height)
    x = _coordinates(variation.left, variation.width, width, size or width)
    x = torch.where(variation.mirrored[:, None], x.flip(1), x)
    grid = torch.stack(torch.broadcast_tensors(x[:, None, :], y[:, :, None]), -1)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _coordinates(start: Tensor, length: Tensor, side: int, size: int) -> Tensor:
    """Where the `size` pixels of the result lie along a side of the image, in -1..1 of it: [images, size].

    Held inside the crop, whose outermost pixels go on as they are: what lies outside is cut off.
    """
    pixel = torch.arange(size, device=start.device)
    inside = ((pixel + 0.5) * length[:, None] / size - 0.5).clamp(min=0).minimum(length[:, None] - 1)
    return ((2 * (start[:, None] + inside) + 1) / side - 1).float()


def _jitter(images: Tensor, order: Tensor, factors: Tensor) -> Tensor:
    """Brightness, contrast and saturation in each image's own order.

    Each is a blend of the image with another one: black, its mean grey, itself in grey.
    """
    for step in order.T:
        factor = factors.gather(1, step[:, None])[..., None, None]
        contrast, saturation = (step == 1)[:, None, None, None], (step == 2)[:, None, None, None]
        grey = _grey(images)
        other = grey * saturation + grey.mean((2, 3), keepdim=True) * contrast
        images = (factor * images + (1 - factor) * other).clamp(0, 1)
    return images


def _grey(images: Tensor) -> Tensor:
    """[images, 1, height, width]; one channel is its own grey, so that saturation leaves it alone."""
    if images.shape[1] == 1:
        return images
    # By numbers, not by a tensor of them: that would come from the host, which a recorded step cannot ask.
    red, green, blue = (weight * channel for weight, channel in zip(_LUMA, images.split(1, 1), strict=True))
    return red + green + blue


def augmented(
    classes: ClassSet,
    settings: AugmentSettings,
    number: Tensor,
    whole: int | None = None,
    rows: slice = slice(None),
    size: int | None = None,
) -> Callable[[Tensor], Tensor]:
    """A function of indices [rows, *]: their images, augmented, floats in 0 to 1, [rows, *, C, H, W].

    Each call draws anew. Where the images are those of some `rows` of a `whole` batch, what is random is drawn for
    all of it, so that a process that has a part of a batch sees what one that has all of it sees there.
    """
    calls = count()

    def look(indices: Tensor) -> Tensor:
        drawn_from = scattered(number + next(calls))
        images = classes.pixels(indices.flatten())
        total = len(indices) if whole is None else whole
        height, width = images.shape[-2:]
        drawn = draw_variation(total * indices[0].numel(), height, width, settings, drawn_from)
        variation = Variation(*(field.unflatten(0, (total, -1))[rows].flatten(0, 1) for field in drawn))
        return vary(images, variation, size).unflatten(0, tuple(indices.shape))

    return look
