"""A learner as one file: safetensors, with its settings and the images it takes in the metadata."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from npbml.devices import named_device
from npbml.errors import RunError, SettingError
from npbml.learner.learner import Learner
from npbml.learner.settings import LARGEST_IMAGE, ImageSpec, LearnerSettings
from npbml.settings import from_dict, to_dict
from npbml.tensor_files import check_weights, load_tensors, save_tensors
from npbml.version import __version__


def about_learner(settings: LearnerSettings, images: ImageSpec) -> dict[str, Any]:
    """What the metadata of a learner's file say."""
    return {"npbml": __version__, "images": to_dict(images), "settings": to_dict(settings)}


def save_learner(learner: Learner, path: str | Path, about: Mapping[str, Any] | None = None) -> None:
    """Write a learner to a file; `about` is kept beside its settings."""
    own = about_learner(learner.settings, learner.images)
    save_tensors(Path(path), learner.state_dict(), {**(about or {}), **own})


def load_learner(path: str | Path, device: str = "auto", settings: LearnerSettings | None = None) -> Learner:
    """Read a learner from its file. `settings` are for a file of version 0.1, which has none in it.

    Raises:
        RunError: The file is not there, damaged, or does not hold a learner.
    """
    path = Path(path)
    tensors, about = load_tensors(path)
    images = read_images(path, about)
    learner = make_learner(path, read_settings(path, about) if settings is None else settings, images, tensors)
    return learner.to(named_device(device))


def make_learner(
    path: Path, settings: LearnerSettings, images: ImageSpec, tensors: Mapping[str, Tensor]
) -> Learner:
    """The learner of a file that says so, with the file's tensors.

    Raises:
        RunError: The tensors are not those of such a learner.
        SettingError: Such a learner cannot be made here.
    """
    # What the settings ask for is in the file: they cannot ask for more than it has.
    room = max([LARGEST_IMAGE, *(tensor.numel() for tensor in tensors.values())])
    if max(settings.net.filters, *(settings.net.widths or ()), *settings.scorer.widths) > room:
        raise _unreadable(path, "its settings ask for more than it holds")
    try:
        learner = Learner(settings, images)
    except (RuntimeError, MemoryError) as error:
        raise _unreadable(path, f"its learner cannot be made, {error}") from None
    take_tensors(learner, tensors, path)
    return learner


def read_images(path: Path, about: Mapping[str, Any]) -> ImageSpec:
    """The images that a learner takes, from the metadata of its file.

    Raises:
        RunError: They are not described, or cannot be as they are described.
    """
    try:
        return from_dict(ImageSpec, about["images"])
    except (KeyError, TypeError, SettingError) as error:
        raise _unreadable(path, error) from None


def read_settings(path: Path, about: Mapping[str, Any]) -> LearnerSettings:
    """The settings of a learner, from the metadata of its file.

    Raises:
        RunError: They are missing, or not those of a learner.
    """
    try:
        return from_dict(LearnerSettings, about["settings"], LearnerSettings())
    except (KeyError, TypeError, SettingError) as error:
        raise _unreadable(path, error) from None


def take_tensors(learner: Learner, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Load the tensors of a file, or say that they are not those of such a learner."""
    check_weights(path, tensors, learner.state_dict())
    try:
        learner.load_state_dict(tensors)
    except RuntimeError as error:
        raise RunError(f"{path} does not fit its settings: {' '.join(str(error).split())}") from None


def _unreadable(path: Path, error: Exception | str) -> RunError:
    why = f"it has no {error}" if isinstance(error, KeyError) else str(error).rstrip(".")
    return RunError(f"{path} does not hold a learner that can be read: {why}.")
