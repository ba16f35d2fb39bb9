"""Views of a batch of images: rotated, mirrored, enlarged."""

import torch.nn.functional as F
from torch import Tensor

ROTATIONS = 4  # by 0, 90, 180 and 270 degrees


def rotations(images: Tensor) -> list[Tensor]:
    """The images [..., height, width] as they are, and rotated by 90, 180 and 270 degrees."""
    return [images, *(images.rot90(quarters, (-2, -1)) for quarters in range(1, ROTATIONS))]


def enlarged(images: Tensor, factor: float) -> Tensor:
    """The images [n, channels, height, width], larger by a factor; themselves where that is 1."""
    if factor == 1:
        return images
    size = [round(factor * side) for side in images.shape[-2:]]
    return F.interpolate(images, size, mode="bilinear", align_corners=False)
