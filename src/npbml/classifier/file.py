"""A fitted classifier as one file: safetensors, with JSON in its metadata (see tensor_files for the digest)."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from npbml.classifier.card import describe
from npbml.classifier.fitted import Fitted, Kept, answers_alone, keeps_features
from npbml.classifier.labels import check_label
from npbml.devices import named_device
from npbml.errors import DataError, RunError, SettingError
from npbml.learner.file import about_learner, make_learner, read_images, read_settings
from npbml.learner.learner import Learner
from npbml.tensor_files import is_finite, load_tensors, save_tensors

FORMAT, VERSION = "npbml classifier", 1


def save_classifier(
    fitted: Fitted, path: Path, parameters: Mapping[str, Any], learner: str, thumbnails: bool
) -> None:
    """Write a classifier to a file.

    Args:
        fitted: What it knows.
        path: The file; it is replaced as a whole or not at all.
        parameters: Of the constructor, those that are not about the learner.
        learner: What its learner is called, for the card.
        thumbnails: Whether small copies of the labelled pictures are kept in the file.

    Raises:
        DataError: A class has a name that cannot be written.
        RunError: The file cannot be written.
    """
    labelled = fitted.labelled if thumbnails else _without_thumbnails(fitted.labelled)
    tensors = {
        **{f"learner.{name}": tensor for name, tensor in fitted.learner.state_dict().items()},
        **{f"theta.{name}": tensor for name, tensor in (fitted.theta or {}).items()},
        **{f"labelled.{name}": tensor for name, tensor in _tensors(labelled).items()},
        **{f"unlabelled.{name}": tensor for name, tensor in _tensors(_without_thumbnails(fitted.pool)).items()},
        "labelled.codes": torch.tensor(fitted.codes),
    }
    about = {
        **about_learner(fitted.learner.settings, fitted.learner.images),
        "format": FORMAT,
        "version": VERSION,
        "classes": [encode_label(label) for label in fitted.classes],
        "parameters": {**parameters, "unknown": encode_label(parameters["unknown"])},
        "temperature": fitted.temperature,
        "learner": learner,
        # Names of folders may be nobody else's business.
        "names": [Path(name).name for name in fitted.labelled.names],
        "card": describe(fitted, learner, parameters["threshold"]),
    }
    save_tensors(path, tensors, about)


def load_classifier(path: Path, device: str) -> tuple[Fitted, dict[str, Any]]:
    """Read a classifier from its file: what it knows, and its parameters.

    Raises:
        RunError: The file is not there, is damaged, or does not hold a classifier.
    """
    place = named_device(device)
    try:
        tensors, about = load_tensors(path)
        if about.get("format") != FORMAT:
            raise RunError(f"{path} does not hold a classifier; FewShotClassifier.save makes such files.")
        if about.get("version") != VERSION:
            raise RunError(
                f"{path} is of version {about.get('version')!r} of the format, and this npbml reads {VERSION}: "
                "update npbml."
            )
        return _read(path, tensors, about, place)
    except RunError:
        raise
    except (DataError, SettingError) as error:
        _refuse(path, str(error).rstrip("."))
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
        MemoryError,
    ) as error:
        _refuse(path, f"{type(error).__name__}, {error}")


def _read(
    path: Path, tensors: dict[str, Tensor], about: dict[str, Any], device: torch.device
) -> tuple[Fitted, dict[str, Any]]:
    """What a file of the right form says, if it agrees with itself."""
    learner = _learner(path, _below("learner.", tensors), about).to(device)
    classes = tuple(decode_label(value) for value in about["classes"])
    _need(path, 2 <= len(set(classes)) == len(classes), "it has no two classes, or one of them twice")
    codes = tensors["labelled.codes"]
    good = codes.dtype == torch.int64 and codes.dim() == 1
    _need(path, good and codes.unique().tolist() == list(range(len(classes))), "its labels are not its classes")
    names = tuple(about["names"])
    _need(path, all(isinstance(name, str) for name in names), "the names of its pictures are not text")
    labelled = _kept(path, learner, _below("labelled.", tensors), names)
    pool_tensors = _below("unlabelled.", tensors)
    pool = _kept(path, learner, pool_tensors, ("",) * len(pool_tensors["items"]))
    _need(path, len(labelled) == len(codes), "it has more or fewer labels than pictures")
    learner.check_ways(len(classes))
    temperature, theta = about["temperature"], _below("theta.", tensors)
    _need(path, math.isfinite(temperature) and temperature > 0, "its temperature is not above 0")
    wanted = learner.adapted_shapes(len(classes)) if answers_alone(learner) else {}
    shapes = {name: value.shape for name, value in theta.items()}
    _need(path, shapes == wanted, "its parameters do not fit")
    _need(path, all(is_finite(value) for value in theta.values()), "its parameters are not finite")
    theta = {name: value.to(device, learner.mean.dtype) for name, value in theta.items()}
    parameters = dict(about["parameters"])
    parameters["unknown"] = decode_label(parameters["unknown"])
    known = {"final_batch", "batch_size", "threshold", "unknown"}
    _need(path, parameters.keys() == known, "its parameters are not those of a classifier")
    codes_ = tuple(codes.tolist())
    fitted = Fitted(learner, classes, labelled, codes_, pool, theta if wanted else None, float(temperature))
    return fitted, parameters


def _learner(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> Learner:
    images = read_images(path, about)
    _need(path, images.channels in (1, 3), "the pictures that it takes are neither grey nor in colour")
    try:
        learner = make_learner(path, read_settings(path, about), images, tensors)
    except SettingError as error:
        raise RunError(f"{path} holds a learner that cannot be made here: {error}") from None
    dtype = next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
    return learner.to(dtype)


def _kept(path: Path, learner: Learner, tensors: dict[str, Tensor], names: tuple[str, ...]) -> Kept:
    items, digests, thumbnails = tensors["items"], tensors["digests"], tensors["thumbnails"]
    images = learner.images
    blank = torch.zeros(
        1, images.channels, images.size, images.size, dtype=torch.uint8, device=learner.mean.device
    )
    like = learner.features(blank) if keeps_features(learner) else blank
    good = items.dtype == like.dtype and items.shape[1:] == like.shape[1:] and is_finite(items)
    good &= digests.dtype == thumbnails.dtype == torch.uint8 and digests.shape[1:] == (32,)
    good &= thumbnails.dim() == 4 and thumbnails.shape[1] == images.channels
    good &= len(items) == len(digests) == len(thumbnails) == len(names)
    _need(path, good, "its pictures are not kept as its learner takes them")
    return Kept(items, digests, thumbnails, names)


def _tensors(kept: Kept) -> dict[str, Tensor]:
    return {"items": kept.items, "digests": kept.digests, "thumbnails": kept.thumbnails}


def _without_thumbnails(kept: Kept) -> Kept:
    return Kept(kept.items, kept.digests, kept.thumbnails[..., :0, :0], kept.names)


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def encode_label(label: Any) -> Any:
    """A label as JSON: itself, or {"tuple": [...]}.

    Raises:
        DataError: It is none of the kinds that can be written.
    """
    if isinstance(label, tuple) and type(label) is tuple:
        return {"tuple": [encode_label(part) for part in label]}
    if type(label) in (str, int, float, bool):
        return label
    raise DataError(
        f"The class {label!r} is of type {type(label).__name__} and cannot be saved: names of classes are "
        "strings, numbers, booleans, or tuples of them."
    )


def decode_label(value: Any) -> Any:
    """The label that `encode_label` has written."""
    if isinstance(value, dict):
        return tuple(decode_label(part) for part in value["tuple"])
    if type(value) not in (str, int, float, bool):
        raise ValueError(f"{value!r} names no class")
    check_label(value, "A class")
    return value


def _need(path: Path, holds: bool, otherwise: str) -> None:
    if not holds:
        _refuse(path, otherwise)


def _refuse(path: Path, why: str) -> NoReturn:
    raise RunError(f"{path} is damaged or not a classifier of npbml: {why}.")
