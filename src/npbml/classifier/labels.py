"""The labels that a user gives, and the classes that they name."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
from torch import Tensor

from npbml.errors import DataError


def label_list(labels: Any, count: int) -> list[Any]:
    """Return the labels of `count` images as a list of hashable values.

    Raises:
        DataError: They are no list, of another length, or one of them cannot name a class.
    """
    if hasattr(labels, "__array__") and not isinstance(labels, Iterable | np.ndarray | np.generic | Tensor):
        labels = np.asarray(labels)
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
    found = [_plain(label) for label in found]
    for number, label in enumerate(found):
        check_label(label, f"Label {number}")
    return found


def _plain(label: Any) -> Any:
    """Scalars of numpy and torch as Python's own: tensors are hashed by identity, so that two are never equal."""
    if isinstance(label, Tensor) and label.ndim == 0:
        return label.item()
    return label.item() if isinstance(label, np.bool_ | np.number | np.str_) else label


def check_label(label: Any, name: str) -> None:
    """Refuse a value that cannot name a class."""
    if isinstance(label, Tensor):
        raise DataError(f"{name} is a tensor with {label.ndim} dimensions: give one value for each image.")
    try:
        hash(label)
    except TypeError:
        raise DataError(
            f"{name} is of type {type(label).__name__}, which cannot name a class: give strings, "
            "numbers or tuples of them."
        ) from None
    try:
        missing = label is None or bool(label != label)  # NaN and NaT differ from themselves
    except (TypeError, ValueError):  # pandas' NA is neither equal nor different
        missing = True
    if missing:
        raise DataError(f"{name} is {label}: every image needs a label.")
    if isinstance(label, tuple):
        for part in label:
            check_label(part, f"A part of {name[0].lower()}{name[1:]}")


def class_list(labels: Sequence[Any]) -> list[Any]:
    """Return the different labels, sorted where they can be, otherwise in the order in which they come.

    Raises:
        DataError: There is only one.
    """
    values = list(dict.fromkeys(labels))
    if len(values) == 1:
        raise DataError(f"Every label is {values[0]!r}, which is one class: give images of at least 2 classes.")
    with contextlib.suppress(TypeError):  # labels of mixed kinds
        values = sorted(values)
    return values


def label_array(values: Sequence[Any]) -> np.ndarray:
    """Return labels as an array [n]: of numbers or strings where that changes none of them, else of objects."""
    if len({type(value) for value in values}) == 1 and np.ndim(values[0]) == 0:
        array = np.array(values)
        if array.ndim == 1 and array.tolist() == list(values):
            return array
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array
