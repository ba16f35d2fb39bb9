"""A classifier for a handful of labelled pictures, in the manner of scikit-learn."""

import contextlib
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from npbml.data.tasks import Task
from npbml.errors import DataError
from npbml.learner import ImageSpec, Learner


class FewShotClassifier:
    """Adapts a meta-trained learner to the pictures and labels given to `fit`.

    Pictures are PIL images, or arrays [n, height, width], [n, height, width, channels] or
    [n, channels, height, width], of bytes or of floats in 0..1, of any size; labels are any values.

    Where the learner normalises by the batch or uses a transductive loss, a prediction depends on the pictures
    that are predicted together with it. `batch` bounds how many these are. `final_batch` says what a prediction
    is normalised with: its batch alone ("query"), the labelled pictures too ("joint"), or, by default, what the
    learner was trained with, except for batches too small to be normalised by themselves, which are joined.
    """

    def __init__(
        self, learner: Learner, final_batch: Literal["auto", "query", "joint"] = "auto", batch: int = 200
    ) -> None:
        self.learner, self.final_batch, self.batch = learner, final_batch, batch

    def fit(self, images: Any, labels: Sequence[Any] | np.ndarray) -> "FewShotClassifier":
        """Take the labelled pictures; the adaptation itself happens with those to be predicted."""
        support = self._tensor(images)
        labels = labels.tolist() if isinstance(labels, (np.ndarray, Tensor)) else list(labels)
        if len(support) != len(labels):
            raise DataError(f"There are {len(support)} images but {len(labels)} labels.")
        values = list(dict.fromkeys(labels))
        with contextlib.suppress(TypeError):  # labels of mixed kinds keep the order in which they come
            values = sorted(values)
        self.learner.check_ways(len(values))
        codes = torch.tensor([values.index(label) for label in labels])
        order = codes.argsort(stable=True)
        self.classes_ = np.empty(len(values), dtype=object)
        self.classes_[:] = values
        if len({type(value) for value in values}) == 1 and np.ndim(values[0]) == 0:
            self.classes_ = np.array(values)
        self._support, self._codes = support[order], codes[order]
        return self

    def predict(self, images: Any) -> np.ndarray:
        """The label of each picture."""
        probabilities = self.predict_proba(images)
        return self.classes_[probabilities.argmax(1)]

    def predict_proba(self, images: Any) -> np.ndarray:
        """Probabilities [n, classes], in the order of `classes_`."""
        if not hasattr(self, "classes_"):
            raise DataError("This classifier has no labelled pictures yet: call fit(images, labels) first.")
        query = self._tensor(images)
        count = math.ceil(len(query) / self.batch)
        logits = torch.cat([self._logits(part) for part in query.tensor_split(count)])
        return logits.softmax(-1).cpu().numpy()

    def score(self, images: Any, labels: Sequence[Any] | np.ndarray) -> float:
        """The share of pictures whose label is predicted."""
        predicted, labels = self.predict(images), list(labels)
        if len(predicted) != len(labels):
            raise DataError(f"There are {len(predicted)} images but {len(labels)} labels.")
        return float(np.mean([one == other for one, other in zip(predicted, labels, strict=True)]))

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        return {"learner": self.learner, "final_batch": self.final_batch, "batch": self.batch}

    def set_params(self, **params: Any) -> "FewShotClassifier":
        for name, value in params.items():
            if name not in self.get_params():
                raise DataError(f"FewShotClassifier has no parameter {name!r}.")
            setattr(self, name, value)
        return self

    @torch.no_grad()
    def _logits(self, query: Tensor) -> Tensor:
        device = next(self.learner.parameters()).device
        final = None if self.final_batch == "auto" else self.final_batch
        if self.final_batch == "auto" and len(query) < 2 * len(self.classes_):
            final = "joint"
        unknown = torch.zeros(len(query), dtype=torch.long)
        task = Task(*(part.to(device) for part in (self._support, self._codes, query, unknown)))
        return self.learner.predict(task, final)

    def _tensor(self, images: Any) -> Tensor:
        pictures = to_pictures(images)
        if not pictures:
            raise DataError("There are no images.")
        return torch.stack([_bytes(picture, self.learner.images) for picture in pictures])


def to_pictures(images: Any) -> list[Image.Image]:
    """PIL images from anything that `FewShotClassifier` takes."""
    if isinstance(images, Image.Image):
        raise DataError("Give a list of images, even for one: [image].")
    if isinstance(images, Tensor):
        images = images.detach().cpu().numpy()
    if isinstance(images, np.ndarray) and images.dtype != object:
        if images.ndim not in (3, 4):
            raise DataError(
                "An array of images has the shape [n, height, width], [n, height, width, channels] or "
                f"[n, channels, height, width], not {list(images.shape)}."
            )
        return [_picture(image, number) for number, image in enumerate(images)]
    return [
        image if isinstance(image, Image.Image) else _picture(np.asarray(image), number)
        for number, image in enumerate(images)
    ]


def _picture(image: np.ndarray, number: int) -> Image.Image:
    if image.ndim == 3 and image.shape[2] not in (1, 3, 4) and image.shape[0] in (1, 3, 4):
        image = image.transpose(1, 2, 0)
    if image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] not in (1, 3, 4)):
        raise DataError(f"Image {number} has the shape {list(image.shape)}: grey or RGB was expected.")
    if np.issubdtype(image.dtype, np.floating):
        if not (np.isfinite(image).all() and image.min() >= 0 and image.max() <= 1):
            raise DataError(f"Image {number} has floats outside 0 to 1: scale them, or give bytes.")
        image = np.round(image * 255).astype(np.uint8)
    elif image.dtype == bool:
        image = image.astype(np.uint8) * 255
    elif image.dtype != np.uint8:
        if not (np.issubdtype(image.dtype, np.integer) and image.min() >= 0 and image.max() <= 255):
            raise DataError(f"Image {number} is of {image.dtype}: bytes, or floats in 0 to 1, were expected.")
        image = image.astype(np.uint8)
    return Image.fromarray(image[..., 0] if image.ndim == 3 and image.shape[2] == 1 else image)


def _bytes(picture: Image.Image, spec: ImageSpec) -> Tensor:
    """A picture of the size and channels that the learner takes: uint8 [channels, size, size]"""
    picture = picture.convert("L" if spec.channels == 1 else "RGB")
    if picture.size != (spec.size, spec.size):
        picture = picture.resize((spec.size, spec.size), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(picture)).view(spec.size, spec.size, spec.channels).permute(2, 0, 1)
