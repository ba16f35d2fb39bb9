"""A learner: a network and a learning rule, ready to adapt to a task."""

from npbml.learner.batches import Acts, Frozen, Prepared, stack_tasks
from npbml.learner.learner import GROUPS, Learner
from npbml.learner.settings import ImageSpec, InitSettings, LearnerSettings, check_learner

__all__ = [
    "GROUPS",
    "Acts",
    "Frozen",
    "ImageSpec",
    "InitSettings",
    "Learner",
    "LearnerSettings",
    "Prepared",
    "check_learner",
    "stack_tasks",
]
