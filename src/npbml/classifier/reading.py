"""Pictures as a classifier reads them: in parts, as the bytes that the learner takes, known by their content."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from npbml.learner.settings import ImageSpec
from npbml.pictures import picture_bytes, picture_list


def read_pictures(pictures: Sequence[Any], images: ImageSpec, first: int = 0) -> Tensor:
    """Return pictures as the learner takes them, uint8 [n, channels, size, size].

    Args:
        pictures: Pictures of any kind, at least one.
        images: What the learner takes.
        first: The number of the first picture, by which errors name it.
    """
    read = [
        picture_bytes(picture, images.size, images.channels, name=f"Image {number}")
        for number, picture in enumerate(pictures, first)
    ]
    return torch.from_numpy(np.stack(read))


def read_parts(pictures: Sequence[Any], images: ImageSpec, batch_size: int) -> Iterator[Tensor]:
    """Yield the pictures in parts of nearly equal size, of `batch_size` at most: memory holds one part."""
    parts, first = -(-len(pictures) // batch_size), 0
    for number in range(parts):
        end = first + len(pictures) // parts + (number < len(pictures) % parts)
        yield read_pictures(pictures[first:end], images, first)
        first = end


def pool_list(pictures: Any) -> list[Any]:
    """Return unlabelled pictures as a list, which may be empty: None, an empty list or an empty iterator."""
    if pictures is None:
        return []
    if isinstance(pictures, Iterator) and not hasattr(pictures, "read"):
        pictures = list(pictures)
    try:
        if len(pictures) == 0:
            return []
    except TypeError:  # it has no length: picture_list says what is wrong
        pass
    return picture_list(pictures)


def picture_digests(images: Tensor) -> Tensor:
    """Return SHA-256 of the bytes of each picture, uint8 [n, 32]: equal pictures are known by it."""
    found = [hashlib.sha256(image.numpy().tobytes()).digest() for image in images]
    return torch.from_numpy(np.frombuffer(b"".join(found), np.uint8).reshape(-1, 32).copy())


def picture_names(pictures: Sequence[Any]) -> tuple[str, ...]:
    """Return the path of each picture that was given as a path, else an empty string."""
    return tuple(str(os.fspath(one)) if isinstance(one, str | os.PathLike) else "" for one in pictures)
