"""A learner as one file: safetensors, with its settings and the images it takes in the metadata."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from npbml.devices import named_device
from npbml.errors import RunError, SettingError
from npbml.learner.learner import Learner
from npbml.learner.settings import ImageSpec, LearnerSettings
from npbml.settings import from_dict, to_dict
from npbml.tensor_files import load_tensors, save_tensors
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
    try:
        images = from_dict(ImageSpec, about["images"])
        if settings is None:
            settings = from_dict(LearnerSettings, about["settings"], LearnerSettings())
    except (KeyError, TypeError, SettingError) as error:
        raise RunError(f"{path} does not hold a learner that can be read: {error}") from None
    learner = Learner(settings, images)
    take_tensors(learner, tensors, path)
    return learner.to(named_device(device))


def take_tensors(learner: Learner, tensors: Mapping[str, Any], path: Path) -> None:
    """Load the tensors of a file, or say that they are not those of such a learner."""
    try:
        learner.load_state_dict(tensors)
    except RuntimeError as error:
        raise RunError(f"{path} does not fit its settings: {error}") from None
