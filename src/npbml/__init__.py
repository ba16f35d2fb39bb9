"""npbml learns how to learn from a few examples.

learner = npbml.load("cifar-fs-conv4")      a meta-trained Learner: shipped, from a file or from a run folder
learner.adapt(task)                         the parameters adapted to a task, by name
learner.predict(task)                       its query logits
npbml.FewShotClassifier(learner).fit(images, labels).predict(more_images)

Names are imported when they are first used: `import npbml` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from npbml.version import __version__

if TYPE_CHECKING:
    from npbml.catalogue import card, load, shipped
    from npbml.classifier import FewShotClassifier
    from npbml.data.arrays import register_dataset
    from npbml.errors import DataError, NpbmlError, RunError, SettingError
    from npbml.learner.file import save_learner
    from npbml.learner.learner import Learner
    from npbml.learner.settings import ImageSpec, LearnerSettings
    from npbml.methods import Recipe, compose, register
    from npbml.nets.backbones import register_backbone
    from npbml.nets.encoder import Encoder
    from npbml.nets.layers import Norm
    from npbml.parts import BACKBONES, DATASETS, HEADS, LOSS_TERMS, METHODS, PRECONDITIONERS, SCORERS
    from npbml.registry import load_plugin
    from npbml.rule.head import Head
    from npbml.rule.loss import LossTerm
    from npbml.rule.precondition import Preconditioner
    from npbml.scorers.scorer import Scorer
    from npbml.tasks import Task

_PLACES = {
    "npbml.catalogue": ("card", "load", "shipped"),
    "npbml.classifier": ("FewShotClassifier",),
    "npbml.data.arrays": ("register_dataset",),
    "npbml.errors": ("DataError", "NpbmlError", "RunError", "SettingError"),
    "npbml.learner.file": ("save_learner",),
    "npbml.learner.learner": ("Learner",),
    "npbml.learner.settings": ("ImageSpec", "LearnerSettings"),
    "npbml.methods": ("Recipe", "compose", "register"),
    "npbml.nets.backbones": ("register_backbone",),
    "npbml.nets.encoder": ("Encoder",),
    "npbml.nets.layers": ("Norm",),
    "npbml.parts": ("BACKBONES", "DATASETS", "HEADS", "LOSS_TERMS", "METHODS", "PRECONDITIONERS", "SCORERS"),
    "npbml.registry": ("load_plugin",),
    "npbml.rule.head": ("Head",),
    "npbml.rule.loss": ("LossTerm",),
    "npbml.rule.precondition": ("Preconditioner",),
    "npbml.scorers.scorer": ("Scorer",),
    "npbml.tasks": ("Task",),
}
_MODULES = {name: module for module, names in _PLACES.items() for name in names}

__all__ = [
    "BACKBONES",
    "DATASETS",
    "HEADS",
    "LOSS_TERMS",
    "METHODS",
    "PRECONDITIONERS",
    "SCORERS",
    "DataError",
    "Encoder",
    "FewShotClassifier",
    "Head",
    "ImageSpec",
    "Learner",
    "LearnerSettings",
    "LossTerm",
    "Norm",
    "NpbmlError",
    "Preconditioner",
    "Recipe",
    "RunError",
    "Scorer",
    "SettingError",
    "Task",
    "__version__",
    "card",
    "compose",
    "load",
    "load_plugin",
    "register",
    "register_backbone",
    "register_dataset",
    "save_learner",
    "shipped",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'npbml' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
