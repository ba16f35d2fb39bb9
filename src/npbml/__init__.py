"""npbml learns how to learn from a few examples.

learner = npbml.load("runs/...")            a meta-trained Learner; or one that comes along: npbml.shipped()
learner.adapt(task)                         the parameters adapted to a task, by name
learner.predict(task)                       its query logits
npbml.FewShotClassifier(learner).fit(images, labels).predict(more_images)
"""

from pathlib import Path

__version__ = "0.1.0"

from npbml.classifier import FewShotClassifier
from npbml.data.tasks import Task
from npbml.errors import DataError, NpbmlError, RunError, SettingError
from npbml.learner import Learner
from npbml.methods import Recipe, compose, register

__all__ = [
    "DataError",
    "FewShotClassifier",
    "Learner",
    "NpbmlError",
    "Recipe",
    "RunError",
    "SettingError",
    "Task",
    "compose",
    "load",
    "register",
    "shipped",
]


LEARNERS = Path(__file__).parent / "learners"


def shipped() -> list[str]:
    """The names of the learners that come with the package."""
    return sorted(folder.parent.name for folder in LEARNERS.glob("*/config.json"))


def load(run: str | Path, method: str | None = None, device: str = "auto") -> Learner:
    """The learner that a run has meta-trained: of the run's own method, or of another that it trained.

    `run` is a run folder, or the name of a learner that comes with the package: `npbml.shipped()`.
    """
    from npbml.config import with_device
    from npbml.run_folder import read_config
    from npbml.runs import Run

    folder = Path(run)
    if not folder.exists():
        if str(run) not in shipped():
            raise RunError(
                f"There is no run folder {run}, and no such learner comes along: {', '.join(shipped())}."
            )
        folder = LEARNERS / str(run)
    return Run(folder, with_device(read_config(folder), device)).learner(method)
