"""Classes whose images are replaced by an encoder's features, which are computed once and kept on disk."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from npbml.data.store import cache_folder
from npbml.data.tasks import ClassSet
from npbml.errors import RunError
from npbml.nets.encoder import Encoder
from npbml.tensor_files import load_tensors, save_tensors

BATCH = {"cpu": 32, "cuda": 256}  # images at a time
SLOW = 1.0  # minutes from which on the work is told beforehand


def encoded(
    classes: ClassSet, encoder: Encoder, checksum: str, say: Callable[[str], None] = lambda words: None
) -> ClassSet:
    """The classes with features float16 [images, width, h, w] in the place of their images.

    Args:
        classes: Classes of images, on any device.
        encoder: What computes the features.
        checksum: Of the images. Features of the same images by the same encoder are read from the cache folder.
        say: Is told of work that takes more than a minute.
    """
    path = _file(encoder, checksum, classes)
    found = _read(path, len(classes.images))
    if found is None:
        found = _computed(classes, encoder, say)
        save_tensors(path, {"features": found}, {"checksum": checksum})
    device = classes.images.device
    none, one = torch.zeros(1, device=device), torch.ones(1, device=device)
    return replace(classes, images=found.to(device), mean=none, std=one)  # features are normalised already


def _file(encoder: Encoder, checksum: str, classes: ClassSet) -> Path:
    parts = encoder.digest.hex(), encoder.size, encoder.mean, encoder.std, encoder.power, checksum
    shown = tuple(classes.images.shape), classes.names
    return cache_folder() / "features" / f"{hashlib.sha256(repr((parts, shown)).encode()).hexdigest()}.safetensors"


def _read(path: Path, count: int) -> Tensor | None:
    """The features of a file; None where there is none, or it is damaged and they are better computed again."""
    try:
        features = load_tensors(path)[0]["features"]
    except (RunError, KeyError):
        return None
    return features if len(features) == count and bool(features.isfinite().all()) else None


@torch.no_grad()
def _computed(classes: ClassSet, encoder: Encoder, say: Callable[[str], None]) -> Tensor:
    images, parts = classes.images, []
    mean, std = (
        torch.tensor(values, device=images.device)[:, None, None] for values in (encoder.mean, encoder.std)
    )
    started, told = time.perf_counter(), False
    for part in images.split(BATCH.get(images.device.type, 32)):
        parts.append(encoder.features((part.float() / 255 - mean) / std).half().cpu())
        minutes = (time.perf_counter() - started) * len(images) / (len(part) * len(parts)) / 60
        if len(parts) == 4 and minutes > SLOW and not told:
            say(f"The features of {len(images)} images are computed once and kept, in about {minutes:.0f} min.")
            told = True
    return torch.cat(parts)
