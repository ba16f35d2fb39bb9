"""What a task must be like before a learner takes it; the checks stand at the door."""

import torch
from torch import Tensor

from npbml.errors import DataError
from npbml.learner.settings import ImageSpec
from npbml.tasks import Task


def check_images(batch: Task, spec: ImageSpec, target: str) -> None:
    """Refuse images of a batch of tasks that the learner cannot take.

    A task with a pool of its own may have no queries: there is enough to adapt to.

    Raises:
        DataError: Wrong dimensions, channels or size; a number of labels that is not that of the images; values
            that are not finite; floats outside 0 to 1.
    """
    own_pool = batch.unlabelled_images is not None
    parts: list[tuple[Tensor, Tensor | None, int]] = [
        (batch.support_images, batch.support_labels, 1),
        (batch.query_images, batch.query_labels, 0 if own_pool else 1),
    ]
    if batch.unlabelled_images is not None:
        parts.append((batch.unlabelled_images, None, 0))
    for images, labels, least in parts:
        if images.dim() != 5 or images.shape[1] < least:
            raise DataError(
                "A task has images of shape [items, channels, height, width], at least one of them, not "
                f"{list(images.shape[1:])}."
            )
        if labels is not None and images.shape[:2] != labels.shape[:2]:
            raise DataError(
                f"A task has a label for each image: here are {images.shape[1]} images and labels of shape "
                f"{list(labels.shape[1:])}."
            )
        check_values(images, spec, target)


def check_values(images: Tensor, spec: ImageSpec, target: str = "classes") -> None:
    """Refuse images [..., channels, height, width] of another size, of other channels or out of range."""
    if tuple(images.shape[-3:]) != (spec.channels, spec.size, spec.size):
        raise DataError(
            f"This learner takes images of {spec.channels} channels and {spec.size}x{spec.size} pixels, not "
            f"{list(images.shape[-3:])}. FewShotClassifier resizes pictures of any kind."
        )
    if not images.numel():
        return
    if images.dtype == torch.uint8:
        return
    if not images.is_floating_point():
        raise DataError(
            f"Images are bytes (uint8), or floats in 0 to 1, not {str(images.dtype).removeprefix('torch.')}."
        )
    low, high = images.aminmax()
    if not (low.isfinite() and high.isfinite()):
        raise DataError("There is NaN or infinity in the images.")
    if target == "classes" and not (low >= 0 and high <= 1):
        raise DataError(
            f"Images of floats lie in 0 to 1, not in {low:.3g} to {high:.3g}: scale them, or give bytes. The "
            "learner normalises them itself."
        )


def check_labels(batch: Task) -> int:
    """The number of classes of a batch of tasks, or an error that says what is wrong with the support labels."""
    labels = batch.support_labels
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise DataError(f"Labels are whole numbers, not {str(labels.dtype).removeprefix('torch.')}.")
    found = labels.unique().tolist()
    if found != list(range(len(found))):
        raise DataError(f"The support labels of a task are 0 to ways - 1, not {found}.")
    return len(found)
