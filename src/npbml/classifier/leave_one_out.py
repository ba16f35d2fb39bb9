"""How well a classifier knows its own examples: each is predicted by one that has not seen it."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from npbml.classifier.fitted import Fitted
from npbml.errors import DataError, NotFiniteError


@dataclass(frozen=True)
class LeftOut:
    """A labelled picture, as a classifier sees it that was adapted without it."""

    number: int  # its place among the labelled pictures
    name: str  # its path, or "Image" and its number
    label: Any
    predicted: Any
    probability: float  # of its label
    confidence: float  # the probability of what is predicted
    looks_mislabelled: bool = False


@dataclass(frozen=True)
class LeaveOneOut:
    """An estimate of a classifier's accuracy, from its own labelled pictures.

    Classes with a single example are not covered: without it, the class would not be there. They are among the
    answers that the other pictures can get. The estimate is of a classifier with one example less.
    """

    accuracy: float  # the share of the pictures whose label is predicted
    pictures: tuple[LeftOut, ...]
    not_covered: tuple[Any, ...]  # the classes with a single example

    @property
    def mislabelled(self) -> tuple[LeftOut, ...]:
        """The pictures that look mislabelled, the clearest first."""
        found = (picture for picture in self.pictures if picture.looks_mislabelled)
        return tuple(sorted(found, key=lambda picture: picture.probability - picture.confidence))

    def __str__(self) -> str:
        right = sum(picture.predicted == picture.label for picture in self.pictures)
        lines = [f"{right} of {len(self.pictures)} pictures are predicted right without themselves."]
        lines += [
            f"{picture.name} is labelled {picture.label!r} and looks like {picture.predicted!r} "
            f"({picture.confidence:.0%})."
            for picture in self.mislabelled
        ]
        if self.not_covered:
            names = ", ".join(repr(label) for label in self.not_covered)
            lines.append(f"Not covered, with a single example: {names}.")
        return "\n".join(lines)


def leave_one_out(fitted: Fitted) -> LeaveOneOut:
    """Predict each labelled picture by a classifier that is adapted without it, and without copies of it.

    A picture looks mislabelled if another class is predicted, with at least the probability that pictures of that
    class get for it on average (the rule of confident learning, Northcutt and others, 2021).

    Raises:
        DataError: No class has two different examples.
    """
    keys, codes = fitted.labelled.keys(), fitted.codes
    different = [len({k for k, c in zip(keys, codes, strict=True) if c == code}) for code in range(max(codes) + 1)]
    covered = [place for place, code in enumerate(codes) if different[code] > 1]
    if not covered:
        raise DataError(
            "leave_one_out needs a class with two different examples, and every class has one: add examples."
        )
    probabilities = np.stack([_without(fitted, keys, place) for place in covered])
    own = probabilities[np.arange(len(covered)), [codes[place] for place in covered]]
    best = probabilities.argmax(1)
    usual = np.full(len(fitted.classes), own.mean())
    for code, count in enumerate(different):
        if count > 1:
            usual[code] = own[[codes[place] == code for place in covered]].mean()
    pictures = []
    for row, place in enumerate(covered):
        confidence = float(probabilities[row, best[row]])
        pictures.append(
            LeftOut(
                place,
                fitted.labelled.names[place] or f"Image {place}",
                fitted.classes[codes[place]],
                fitted.classes[best[row]],
                float(own[row]),
                confidence,
                looks_mislabelled=bool(best[row] != codes[place] and confidence >= usual[best[row]]),
            )
        )
    accuracy = float(np.mean([best[row] == codes[place] for row, place in enumerate(covered)]))
    alone = tuple(label for label, count in zip(fitted.classes, different, strict=True) if count == 1)
    return LeaveOneOut(accuracy, tuple(pictures), alone)


def _without(fitted: Fitted, keys: list[bytes], place: int) -> np.ndarray:
    """The probabilities [classes] of a labelled picture, from the others."""
    others = [other for other, key in enumerate(keys) if key != keys[place]]
    fewer = replace(
        fitted,
        labelled=fitted.labelled.take(others),
        codes=tuple(fitted.codes[other] for other in others),
        pool=fitted.pool.without([keys[place]]),
    ).adapted()
    logits = fewer.kept_logits(fitted.labelled.items[place : place + 1])
    probabilities = logits.softmax(-1)[0].cpu().numpy()
    if not np.isfinite(probabilities).all():
        raise NotFiniteError(f"The answer for labelled picture {place}, left out, is not finite.")
    return probabilities
