"""A classifier for a handful of labelled pictures, in the manner of scikit-learn."""

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from npbml.errors import DataError, SettingError
from npbml.learner.learner import Learner
from npbml.learner.settings import ImageSpec
from npbml.pictures import picture_bytes, picture_list
from npbml.tasks import Task


class FewShotClassifier:
    """Adapt a meta-trained learner to the pictures and labels given to `fit`.

    Pictures are a list of paths, PIL images, arrays or tensors, or one array or tensor [n, height, width],
    [n, height, width, channels] or [n, channels, height, width], of bytes or of floats in 0 to 1; of any size,
    grey or colour (see `npbml.pictures.read_picture`). Labels are hashable values of any kind, but not None or
    NaN.

    A learner of `npbml-any`, such as those that come with the package, takes any number of classes and answers
    each picture by itself: `fit` adapts it, and `predict` changes nothing. Unlabelled pictures help it.

    Other learners normalise pictures together or look at those to be predicted: a prediction then depends on the
    pictures that are predicted with it, and adaptation happens in `predict`.

    Args:
        learner: A meta-trained learner.
        final_batch: Of learners that normalise pictures together, what a prediction is normalised with: its batch
            alone ("query"), the labelled pictures too ("joint"), or, by default, what the learner was trained
            with, except for batches too small to be normalised by themselves, which are joined ("auto").
        batch_size: How many pictures are predicted together at most.

    Attributes:
        classes_: The labels [classes], sorted where they can be; set by `fit`.

    Example:
        >>> classifier = FewShotClassifier(npbml.load("cifar-fs-conv4"))
        >>> classifier.fit(["cat1.jpg", "dog1.jpg"], ["cat", "dog"], unlabelled=["a.jpg", "b.jpg", "c.jpg"])
        >>> classifier.predict(["new.jpg"])
    """

    def __init__(
        self, learner: Learner, final_batch: Literal["auto", "query", "joint"] = "auto", batch_size: int = 200
    ) -> None:
        self.learner, self.final_batch, self.batch_size = learner, final_batch, batch_size

    def fit(
        self, images: Any, labels: Sequence[Any] | np.ndarray, unlabelled: Any | None = None
    ) -> "FewShotClassifier":
        """Adapt to the labelled pictures, and to unlabelled ones where there are any.

        Args:
            images: n pictures.
            labels: Their n labels, at least two of them different.
            unlabelled: Pictures of the same classes without a label: the more, the better. Those to be predicted
                may be among them.

        Raises:
            DataError: A picture or a label cannot be used, or the learner cannot take this number of classes.
        """
        support = self._tensor(images)
        labels = _label_list(labels, len(support))
        values = list(dict.fromkeys(labels))
        if len(values) == 1:
            raise DataError(f"Every label is {values[0]!r}: give images of at least 2 classes.")
        with contextlib.suppress(TypeError):  # labels of mixed kinds keep the order in which they come
            values = sorted(values)
        self.learner.check_ways(len(values))
        pool = support[:0]
        if unlabelled is not None and len(unlabelled) > 0:
            self._check_pool()
            pool = self._tensor(unlabelled)
        codes = torch.tensor([values.index(label) for label in labels])
        order = codes.argsort(stable=True)
        support, codes = support[order], codes[order]
        if self.learner.settings.needs_no_pool:
            with torch.no_grad():
                none = support[:0], codes[:0]
                self._theta = self.learner.adapt(self._task(support, codes, *none, pool))
            self._temperature = self.learner.temperature(len(values), len(support), len(pool))
        self._support, self._codes = support, codes
        self.classes_ = np.empty(len(values), dtype=object)
        self.classes_[:] = values
        if len({type(value) for value in values}) == 1 and np.ndim(values[0]) == 0:
            self.classes_ = np.array(values)
        return self

    def _check_pool(self) -> None:
        if not self.learner.settings.needs_no_pool:
            raise DataError(
                "This learner takes the pictures to be predicted for its unlabelled ones, and no others: call fit "
                "without unlabelled, and predict many pictures in one call."
            )

    def predict(self, images: Any) -> np.ndarray:
        """Return the label of each picture, [n]."""
        probabilities = self.predict_proba(images)
        return self.classes_[probabilities.argmax(1)]

    def predict_proba(self, images: Any) -> np.ndarray:
        """Return the probabilities [n, classes], in the order of `classes_`."""
        if not hasattr(self, "classes_"):
            raise DataError("This classifier has no labelled pictures yet: call fit(images, labels) first.")
        if self.batch_size < 1:
            raise SettingError(f"batch_size is {self.batch_size}; it must be at least 1.")
        query = self._tensor(images)
        count = math.ceil(len(query) / self.batch_size)
        logits = torch.cat([self._logits(part) for part in query.tensor_split(count)])
        return logits.softmax(-1).cpu().numpy()

    def score(self, images: Any, labels: Sequence[Any] | np.ndarray) -> float:
        """Return the share of pictures whose label is predicted."""
        predicted = self.predict(images)
        labels = _label_list(labels, len(predicted))
        return float(np.mean([one == other for one, other in zip(predicted, labels, strict=True)]))

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        return {"learner": self.learner, "final_batch": self.final_batch, "batch_size": self.batch_size}

    def set_params(self, **params: Any) -> "FewShotClassifier":
        for name, value in params.items():
            if name not in self.get_params():
                raise DataError(f"FewShotClassifier has no parameter {name!r}.")
            setattr(self, name, value)
        return self

    @torch.no_grad()
    def _logits(self, query: Tensor) -> Tensor:
        if self.learner.settings.needs_no_pool:
            logits = self.learner.answer(self._theta, query.to(next(self.learner.parameters()).device))
            return logits / self._temperature
        final = None if self.final_batch == "auto" else self.final_batch
        if self.final_batch == "auto" and len(query) < 2 * len(self.classes_):
            final = "joint"
        unknown = torch.zeros(len(query), dtype=torch.long)
        return self.learner.predict(self._task(self._support, self._codes, query, unknown), final)

    def _task(self, *parts: Tensor) -> Task:
        device = next(self.learner.parameters()).device
        return Task(*(part.to(device) for part in parts))

    def _tensor(self, images: Any) -> Tensor:
        """Return the pictures as the learner takes them, uint8 [n, channels, size, size]."""
        spec: ImageSpec = self.learner.images
        pictures = [
            picture_bytes(picture, spec.size, spec.channels, name=f"Image {number}")
            for number, picture in enumerate(picture_list(images))
        ]
        return torch.from_numpy(np.stack(pictures))


def _label_list(labels: Any, count: int) -> list[Any]:
    """Return the labels of `count` images as a list of hashable values, or raise a DataError."""
    dimensions = getattr(labels, "ndim", 1)
    if dimensions != 1:
        raise DataError(f"The labels have {dimensions} dimensions: give a list of one label for each image.")
    if isinstance(labels, str | bytes | Mapping | Set) or not isinstance(labels, Iterable):
        raise DataError(
            f"The labels are of type {type(labels).__name__}: give a list of one label for each image."
        )
    found = labels.tolist() if isinstance(labels, np.ndarray | Tensor) else list(labels)
    if len(found) != count:
        raise DataError(f"There are {count} images but {len(found)} labels.")
    # Tensors are hashed by identity: two of the same value would be two classes.
    found = [label.item() if isinstance(label, Tensor) and label.ndim == 0 else label for label in found]
    for number, label in enumerate(found):
        _check_label(label, number)
    return found


def _check_label(label: Any, number: int) -> None:
    try:
        hash(label)
    except TypeError:
        raise DataError(
            f"Label {number} is of type {type(label).__name__}, which cannot name a class: give strings, "
            "numbers or tuples of them."
        ) from None
    if isinstance(label, Tensor):
        raise DataError(f"Label {number} is a tensor with {label.ndim} dimensions: give one value for each image.")
    try:
        missing = label is None or bool(label != label)  # NaN and NaT differ from themselves
    except TypeError:  # pandas' NA is neither equal nor different
        missing = True
    if missing:
        raise DataError(f"Label {number} is {label}: every image needs a label.")
