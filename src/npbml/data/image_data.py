"""The images of a run: a store, shown in the size that was asked for, split by split."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from npbml.data.request import Request
from npbml.data.store import SPLITS, Split, Store
from npbml.data.tasks import ClassSet
from npbml.learner.settings import ImageSpec


@dataclass(frozen=True)
class ImageData:
    """A data set of images, for tasks of a certain size."""

    store: Store
    request: Request

    @property
    def checksum(self) -> str:
        """Of the images as they are stored."""
        return self.store.checksum

    @cached_property
    def spec(self) -> ImageSpec:
        """What a learner of these images takes."""
        return self.classes("train").spec

    def classes(self, split: Split) -> ClassSet:
        """The classes of a split in the size of the run, with enough of them and of their images for its tasks."""
        classes = self.store.classes(split)
        if self.request.size:
            classes = classes.shown_as(self.store.channels, self.request.size)
        classes.check(self.request.ways, self.request.shots, self.request.queries)
        return classes

    def splits(self, device: torch.device) -> dict[str, ClassSet]:
        """train, val and test, on the device."""
        return {name: self.classes(name).to(device) for name in SPLITS}


def shown_to(classes: ClassSet, images: ImageSpec) -> ClassSet:
    """Classes in the size, channels and normalisation that a learner takes."""
    shown = classes.shown_as(images.channels, images.size)
    return replace(shown, mean=torch.tensor(images.mean), std=torch.tensor(images.std))
