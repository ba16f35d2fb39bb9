"""Odd inputs: each gets an answer or one clear sentence, none a traceback of another kind, none NaN."""

import io
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from npbml import DataError, FewShotClassifier, RunError, SettingError
from npbml.learner.learner import Learner

random = np.random.default_rng(0)
X = random.integers(0, 256, (4, 20, 20, 3), dtype=np.uint8)
Y = ["a", "a", "b", "b"]


class Series:
    """What pandas' Series is to a library that does not know it."""

    ndim = 1

    def __init__(self, values: Any) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Any:
        return iter(self.values)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array(self.values, dtype=dtype)

    def __getitem__(self, key: Any) -> Any:  # by label, as pandas has it: a list is no key
        raise KeyError(key)


class Missing:
    """pandas' NA: its comparison has no truth."""

    def __ne__(self, other: object) -> Any:
        return self

    def __bool__(self) -> bool:
        raise TypeError("boolean value of NA is ambiguous")

    __hash__ = object.__hash__


def image(mode: str, size: tuple[int, int] = (9, 7)) -> Image.Image:
    return Image.new(mode, size)


def file(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


def png(folder: Path) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(X[0]).save(stream, "PNG")
    return stream.getvalue()


def bomb() -> bytes:
    """A PNG that says that it has 10^10 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = (100_000).to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00"
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


ANSWER = None  # an answer is expected
# Pictures to be predicted, made in a folder: what they are, and what the error says, if there is one.
PICTURES: dict[str, tuple[Callable[[Path], Any], str | None]] = {
    "a PIL image that is not in a list": (lambda at: image("RGB"), r"\[image\]"),
    "a path that is not in a list": (lambda at: "cat.png", r"\[image\]"),
    "an array of one picture": (lambda at: X[0], "looks like one image"),
    "three planes of a tensor: three grey pictures": (lambda at: torch.zeros(3, 20, 20), ANSWER),
    "no pictures": (lambda at: [], "There are no images"),
    "an empty array": (lambda at: X[:0], "There are no images"),
    "None": (lambda at: None, "NoneType"),
    "a number": (lambda at: 3, "int: give a list"),
    "a list of numbers": (lambda at: [3, 4], "shape"),
    "a list of None": (lambda at: [None], "Image 0"),
    "a dictionary": (lambda at: {"a": X[0]}, "dict: give a list"),
    "a set": (lambda at: {"a.png"}, "set: give a list"),
    "bytes": (lambda at: b"abc", r"\[image\]"),
    "a list of bytes": (lambda at: [png(at)], "Image 0 is"),
    "a list of text": (lambda at: ["no such file.png"], "There is no image file"),
    "an empty name": (lambda at: [""], "There is no image file"),
    "a name with a null byte": (lambda at: ["a\0b.png"], "There is no image file"),
    "a name that is too long": (lambda at: ["a" * 5000], "aaaa"),
    "NaN in a picture": (lambda at: np.full((1, 8, 8), np.nan), "NaN or infinite"),
    "infinity in a picture": (lambda at: np.full((1, 8, 8), np.inf), "NaN or infinite"),
    "floats above 1": (lambda at: X / 2.0, "outside 0 to 1"),
    "negative floats": (lambda at: X / 255 - 0.5, "outside 0 to 1"),
    "complex numbers": (lambda at: np.zeros((1, 8, 8), complex), "complex"),
    "five channels": (lambda at: np.zeros((1, 8, 8, 5), np.uint8), r"\[8, 8, 5\]"),
    "rows of numbers": (lambda at: np.zeros((4, 8)), r"not \[4, 8\]"),
    "a fifth dimension": (lambda at: np.zeros((1, 1, 8, 8, 3)), r"not \[1, 1, 8, 8, 3\]"),
    "a picture of no pixels": (lambda at: np.zeros((1, 0, 8, 3), np.uint8), "empty"),
    "objects in an array": (lambda at: np.array([object()]), "Image 0"),
    "nested lists of pictures": (lambda at: [[X[0]]], "shape"),
    "a grey picture": (lambda at: [image("L")], ANSWER),
    "a black and white picture": (lambda at: [image("1")], ANSWER),
    "a palette picture": (lambda at: [image("P")], ANSWER),
    "an RGBA picture": (lambda at: [image("RGBA")], ANSWER),
    "a grey picture with alpha": (lambda at: [image("LA")], ANSWER),
    "a CMYK picture": (lambda at: [image("CMYK")], ANSWER),
    "a 16 bit picture": (lambda at: [image("I;16")], ANSWER),
    "a picture of floats": (lambda at: [image("F")], "mode 'F'"),
    "an array of 16 bits": (lambda at: X.astype(np.uint16) * 257, ANSWER),
    "one pixel": (lambda at: [image("RGB", (1, 1))], ANSWER),
    "5000 x 1 pixels": (lambda at: [image("RGB", (5000, 1))], ANSWER),
    "1 x 5000 pixels": (lambda at: [image("RGB", (1, 5000))], ANSWER),
    "pictures of different sizes and kinds": (lambda at: [X[0], image("L"), torch.zeros(3, 4, 5)], ANSWER),
    "a generator": (lambda at: (picture for picture in X), ANSWER),
    "a tuple": (lambda at: tuple(X), ANSWER),
    "a series of arrays": (lambda at: Series(list(X)), ANSWER),
    "a series of paths": (lambda at: Series([str(file(at, "a.png", png(at)))]), ANSWER),
    "an open file": (lambda at: [io.BytesIO(png(at))], ANSWER),
    "a tensor that has a gradient": (lambda at: torch.rand(2, 3, 8, 8, requires_grad=True), ANSWER),
    "a tensor of bfloat16": (lambda at: torch.rand(2, 3, 8, 8).bfloat16(), ANSWER),
    "a memory-mapped, read-only array": (lambda at: np.broadcast_to(X[:1], (2, 20, 20, 3)), ANSWER),
    "a truncated file": (lambda at: [file(at, "half.png", png(at)[:300])], "half.png cannot be read"),
    "an empty file": (lambda at: [file(at, "empty.png", b"")], "empty.png cannot be read"),
    "a text file": (lambda at: [file(at, "text.png", b"some text")], "text.png cannot be read"),
    "a file that says it is huge": (lambda at: [file(at, "bomb.png", bomb())], "bomb.png cannot be read"),
    "a folder": (lambda at: [at], "is a folder"),
    "a missing file": (lambda at: [at / "missing.png"], "There is no image file"),
}
# Labels of four pictures.
LABELS: dict[str, tuple[Any, str | None]] = {
    "too few": (["a", "b"], "4 images but 2 labels"),
    "too many": (["a"] * 5, "4 images but 5 labels"),
    "None": (None, "NoneType"),
    "text": ("aabb", "str: give a list"),
    "a number": (3, "int: give a list"),
    "a set": ({1, 2, 3, 4}, "set: give a list"),
    "one class": (["a"] * 4, "one class"),
    "one of them None": (["a", "a", "b", None], "Label 3 is None"),
    "one of them NaN": ([1.0, 2.0, 3.0, float("nan")], "Label 3 is nan"),
    "one of them missing": (["a", "a", "b", Missing()], "Label 3"),
    "NaN in a tuple": ([(1, float("nan"))] * 2 + [(1, 2)] * 2, "A part of label 0 is nan"),
    "lists": ([["a"], ["a"], ["b"], ["b"]], "Label 0 is of type list"),
    "a column": (np.array([[0], [0], [1], [1]]), "2 dimensions"),
    "one-hot": (np.eye(4), "2 dimensions"),
    "booleans": ([True, True, False, False], ANSWER),
    "tuples": ([("a", 1), ("a", 1), ("b", 1), ("b", 1)], ANSWER),
    "mixed kinds": (["a", 1, 2.5, ("b", 1)], ANSWER),
    "empty text": (["", "", "b", "b"], ANSWER),
    "text that ends in a null byte": (["a", "a", "a\0", "a\0"], ANSWER),
    "large whole numbers": ([2**63, 2**63, -1, -1], ANSWER),
    "infinity": ([float("inf"), 1.0, 1.0, float("inf")], ANSWER),
    "dates": (np.array(["2026-01-01", "2026-01-02"] * 2, dtype="datetime64[D]"), ANSWER),
    "a series": (Series(Y), ANSWER),
    "a generator": ((label for label in Y), ANSWER),
    "a tensor": (torch.tensor([0, 0, 1, 1]), ANSWER),
}
# Parameters, and what else is given to fit.
CALLS: dict[str, tuple[dict[str, Any], Any, str | None]] = {
    "no batch": ({"batch_size": 0}, None, "batch_size is 0"),
    "many": ({"batch_size": "many"}, None, "batch_size is 'many'"),
    "half a picture": ({"batch_size": 0.5}, None, "batch_size is 0.5"),
    "true": ({"batch_size": True}, None, "batch_size is True"),
    "one by one": ({"batch_size": 1}, None, ANSWER),
    "more than certain": ({"threshold": 1.5}, None, "threshold is 1.5"),
    "negative": ({"threshold": -0.1}, None, "threshold is -0.1"),
    "not a number": ({"threshold": float("nan")}, None, "threshold is nan"),
    "in words": ({"threshold": "high"}, None, "threshold is 'high'"),
    "certain": ({"threshold": 1}, None, ANSWER),
    "unknown is a list": ({"threshold": 0.5, "unknown": ["?"]}, None, "unknown is of type list"),
    "unknown is None": ({"threshold": 0.5, "unknown": None}, None, "unknown is None"),
    "unknown is a class": ({"threshold": 0.5, "unknown": "a"}, None, "A class is called 'a'"),
    "another batch": ({"final_batch": "all"}, None, "final_batch is 'all'"),
    "a learner that is not there": (
        {"learner": "no-such-learner"},
        None,
        "no such learner comes with the package",
    ),
    "no name": ({"learner": ""}, None, "learner is"),
    "no learner": ({"learner": None}, None, "learner is of type NoneType"),
    "a class for a learner": ({"learner": Learner}, None, "learner is of type type"),
    "a picture for a learner": ({"learner": X}, None, "learner is of type ndarray"),
    "a device that is not there": ({"learner": "cifar-fs-conv4", "device": "tpu"}, None, "device takes"),
    "a device that is no text": ({"learner": "cifar-fs-conv4", "device": 3}, None, "device takes"),
    "no unlabelled pictures": ({}, [], ANSWER),
    "an empty array of them": ({}, X[:0], ANSWER),
    "an empty generator of them": ({}, iter(()), ANSWER),
    "one unlabelled picture": ({}, X[:1], ANSWER),
    "the labelled ones again": ({}, X, ANSWER),
    "one that is in no list": ({}, "pile.png", r"\[image\]"),
    "a number of them": ({}, 3, "int: give a list"),
    "unlabelled pictures that are missing": ({}, ["none.png"], "There is no image file"),
    "a lone number in an array": ({}, np.array(3), "array of images"),
}


def is_one_sentence(error: Exception) -> bool:
    text = str(error)
    return bool(text) and "\n" not in text and len(text) < 6000


@pytest.mark.parametrize("name", PICTURES)
def test_odd_pictures(learner: Learner, tmp_path: Path, name: str) -> None:
    make, message = PICTURES[name]
    classifier = FewShotClassifier(learner).fit(X, Y)
    if message is None:
        probabilities = classifier.predict_proba(make(tmp_path))
        assert np.isfinite(probabilities).all()
        np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-5)
        return
    for call in (classifier.predict, classifier.transform, lambda odd: classifier.fit(X, Y, unlabelled=odd)):
        if name in ("None", "no pictures", "an empty array") and call not in (
            classifier.predict,
            classifier.transform,
        ):
            continue  # there may be no unlabelled pictures
        with pytest.raises(DataError, match=message) as error:
            call(make(tmp_path))
        assert is_one_sentence(error.value)


@pytest.mark.parametrize("name", LABELS)
def test_odd_labels(learner: Learner, name: str) -> None:
    labels, message = LABELS[name]
    if message is None:
        classifier = FewShotClassifier(learner).fit(X, labels)
        assert set(classifier.predict(X).tolist()) <= set(classifier.classes_.tolist())
        assert len(classifier.classes_) >= 2 and classifier.class_count_.sum() == 4
        return
    with pytest.raises(DataError, match=message) as error:
        FewShotClassifier(learner).fit(X, labels)
    assert is_one_sentence(error.value)


@pytest.mark.parametrize("name", CALLS)
def test_odd_parameters(learner: Learner, name: str) -> None:
    parameters, unlabelled, message = CALLS[name]
    classifier = FewShotClassifier(**{"learner": learner, **parameters})
    if message is None:
        assert np.isfinite(classifier.fit(X, Y, unlabelled).predict_proba(X)).all()
        return
    with pytest.raises((DataError, SettingError, RunError), match=message) as error:
        classifier.fit(X, Y, unlabelled)
    assert is_one_sentence(error.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda one: one.predict(X),
        lambda one: one.predict_proba(X),
        lambda one: one.decision_function(X),
        lambda one: one.transform(X),
        lambda one: one.score(X, Y),
        lambda one: one.add(X, Y),
        lambda one: one.remove(X),
        lambda one: one.leave_one_out(),
        lambda one: one.save("x.npbml"),
        lambda one: one.export("x.onnx"),
        lambda one: one.card(),
        lambda one: one.save_pretrained("x"),
        lambda one: one.push_to_hub("someone/x"),
    ],
)
def test_nothing_is_answered_before_fit(learner: Learner, call: Callable[[FewShotClassifier], Any]) -> None:
    with pytest.raises(DataError, match=r"call fit\(pictures, labels\) first"):
        call(FewShotClassifier(learner))


def test_there_are_more_than_sixty() -> None:
    assert len(PICTURES) + len(LABELS) + len(CALLS) > 60
