"""What a classifier finds in its pictures and keeps: a value that is replaced as a whole and never changed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from npbml.classifier.labels import class_list, label_array
from npbml.classifier.reading import picture_digests
from npbml.errors import DataError, NotFiniteError
from npbml.learner.learner import Learner
from npbml.learner.prepare import needs_images
from npbml.rule.descend import Parameters
from npbml.tasks import Task

THUMBNAIL = 64  # pixels a side at most
# Images in one pass of the frozen network on a CPU, at most, and their pixels: 48 images of 224x224 at once took
# three times as long as 4 at a time (EfficientNet-Lite0, one core).
PASS_IMAGES, PASS_PIXELS = 16, 4 * 224 * 224


@dataclass(frozen=True)
class Kept:
    """Pictures as a fitted classifier keeps them."""

    items: Tensor  # features [n, ...]; or bytes [n, channels, size, size] where the learner looks at them again
    digests: Tensor  # of the bytes, uint8 [n, 32]
    thumbnails: Tensor  # bytes [n, channels, height, width]; of no pixels where none are kept
    names: tuple[str, ...]  # paths, or empty strings

    def __len__(self) -> int:
        return len(self.items)

    def keys(self) -> list[bytes]:
        """The pictures by their content: equal pictures have equal keys."""
        return [bytes(row) for row in self.digests.numpy()]

    def take(self, places: Sequence[int]) -> "Kept":
        """The pictures at these places."""
        index = torch.tensor(places, dtype=torch.long)
        names = tuple(self.names[place] for place in places)
        return Kept(self.items[index], self.digests[index], self.thumbnails[index], names)

    def without(self, keys: Iterable[bytes]) -> "Kept":
        """The pictures that are none of these."""
        left_out = set(keys)
        places = [place for place, key in enumerate(self.keys()) if key not in left_out]
        return self if len(places) == len(self) else self.take(places)

    def joined(self, other: "Kept") -> "Kept":
        """These pictures and others."""
        if not len(self) or not len(other):
            return self if len(self) else other
        items, digests = torch.cat([self.items, other.items]), torch.cat([self.digests, other.digests])
        small = [self.thumbnails, other.thumbnails]
        if small[0].shape[1:] != small[1].shape[1:]:  # there are none of some: they came from a file without
            small = [part[..., :0, :0] for part in small]
        return Kept(items, digests, torch.cat(small), self.names + other.names)


@dataclass(frozen=True)
class Fitted:
    """A learner that is adapted to labelled pictures, and the pictures."""

    learner: Learner
    classes: tuple[Any, ...]
    labelled: Kept
    codes: tuple[int, ...]  # the class of each labelled picture
    pool: Kept
    theta: Parameters | None  # None: the learner adapts to every batch that it predicts
    temperature: float

    @cached_property
    def labels(self) -> np.ndarray:
        """The classes as an array."""
        return label_array(self.classes)

    @property
    def counts(self) -> list[int]:
        """The number of labelled pictures of each class."""
        return np.bincount(self.codes, minlength=len(self.classes)).tolist()

    @torch.no_grad()
    def logits(self, images: Tensor, final_batch: str = "auto") -> Tensor:
        """Logits [n, classes] of pictures, bytes [n, channels, size, size], divided by the temperature."""
        device = self.learner.mean.device
        if self.theta is not None:
            logits = self.learner.answer_features(self.theta, frozen_features(self.learner, images))
            return logits / self.temperature
        final = None if final_batch == "auto" else final_batch
        if final_batch == "auto" and len(images) < 2 * len(self.classes):
            final = "joint"
        support, codes = self._sorted()
        unknown = torch.zeros(len(images), dtype=torch.long)
        task = Task(*(part.to(device) for part in (support, codes, images, unknown)))
        return self.learner.predict(task, final)

    @torch.no_grad()
    def kept_logits(self, item: Tensor) -> Tensor:
        """Logits [1, classes] of a picture that is kept, [1, ...] of `Kept.items`."""
        if self.theta is None or not keeps_features(self.learner):
            return self.logits(item)
        device = self.learner.mean.device
        return self.learner.answer_features(self.theta, item.to(device)) / self.temperature

    @torch.no_grad()
    def embeddings(self, images: Tensor) -> Tensor:
        """Adapted embeddings [n, width] of pictures, bytes [n, channels, size, size]."""
        features = frozen_features(self.learner, images)
        assert self.theta is not None  # the learner has refused otherwise
        return self.learner.embed_features(self.theta, features)

    def _sorted(self) -> tuple[Tensor, Tensor]:
        """The labelled pictures and their codes, sorted by class."""
        codes = torch.tensor(self.codes)
        order = codes.argsort(stable=True)
        return self.labelled.items[order], codes[order]

    def adapted(self) -> "Fitted":
        """The same pictures, with the parameters that the learner finds for them."""
        if not answers_alone(self.learner):
            return replace(self, theta=None, temperature=1.0)
        device = self.learner.mean.device
        support, codes = (part.to(device) for part in self._sorted())
        pool = self.pool.items.to(device)
        with torch.no_grad():
            if keeps_features(self.learner):
                theta = self.learner.adapt_features(support, codes, pool)
            else:
                theta = self.learner.adapt(Task(support, codes, support[:0], codes[:0], pool))
        theta = {name: value.detach().contiguous() for name, value in theta.items()}
        if not all(bool(value.isfinite().all()) for value in theta.values()):
            raise NotFiniteError(
                "Adapting to these pictures led to numbers that are not finite: the learner cannot be used for "
                "them. Look for pictures or labels that are wrong, or choose another learner."
            )
        temperature = self.learner.temperature(len(self.classes), len(self.labelled), len(self.pool))
        return replace(self, theta=theta, temperature=temperature)


def answers_alone(learner: Learner) -> bool:
    """Whether the learner adapts once and then answers each picture by itself."""
    return learner.settings.needs_no_pool and learner.settings.film.refresh != "task"


def keeps_features(learner: Learner) -> bool:
    """Whether features are all that the learner needs of a picture."""
    known = {"features": torch.empty(0)}
    return answers_alone(learner) and not needs_images(learner, known)


def frozen_features(learner: Learner, images: Tensor) -> Tensor:
    """Features [n, ...] of pictures, bytes [n, channels, size, size], on the learner's device."""
    device, count = learner.mean.device, len(images)
    if device.type == "cpu" and count > 1:
        count = max(1, min(PASS_IMAGES, PASS_PIXELS // learner.images.size**2))
    if len(images) <= count:
        return learner.features(images.to(device))
    return torch.cat([learner.features(part.to(device)) for part in images.split(count)])


def keep(learner: Learner, images: Tensor, names: tuple[str, ...], thumbnails: bool) -> Kept:
    """Pictures, bytes [n, channels, size, size], as they are kept for this learner."""
    items = images
    if keeps_features(learner):
        items = frozen_features(learner, images).cpu()
        if not bool(items.isfinite().all()):
            raise NotFiniteError("The learner's features of a picture are not finite: choose another learner.")
    small = images[..., :0, :0]
    if thumbnails:
        side = min(THUMBNAIL, images.shape[-1])
        small = F.interpolate(images.float(), (side, side), mode="area").round().to(torch.uint8)
    return Kept(items, picture_digests(images), small, names)


def fit_kept(learner: Learner, labelled: Kept, labels: Sequence[Any], pool: Kept) -> Fitted:
    """Adapt to labelled and unlabelled pictures. Those that are labelled too count once, as labelled.

    Raises:
        DataError: The same picture has two labels, or the learner cannot take this number of classes.
    """
    _check_one_label(labelled, labels)
    classes = class_list(labels)
    learner.check_ways(len(classes))
    code = {label: number for number, label in enumerate(classes)}
    codes = tuple(code[label] for label in labels)
    pool = pool.without(labelled.keys())
    return Fitted(learner, tuple(classes), labelled, codes, pool, None, 1.0).adapted()


def _check_one_label(labelled: Kept, labels: Sequence[Any]) -> None:
    first: dict[bytes, int] = {}
    for number, key in enumerate(labelled.keys()):
        other = first.setdefault(key, number)
        if labels[other] != labels[number]:
            one, two = (labelled.names[place] or f"Image {place}" for place in (other, number))
            raise DataError(
                f"{one} and {two} are the same picture, with the labels {labels[other]!r} and {labels[number]!r}: "
                "remove one of them."
            )
