"""What the trainers of a run are given beside their own settings."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from npbml.engine.settings import EngineSettings, resolved
from npbml.learner.settings import LearnerSettings


def _silent(words: str) -> None:
    pass


@dataclass(frozen=True)
class Setup:
    """The learner that a run trains, the size of its tasks, its seed, and how and where it computes."""

    learner: LearnerSettings
    shots: int
    queries: int
    seed: int
    engine: EngineSettings
    device: torch.device
    batch_size: int = 10  # tasks that are evaluated at once
    say: Callable[[str], None] = _silent

    @property
    def ways(self) -> int:
        """Classes in a task."""
        return self.learner.ways

    @property
    def resolved_engine(self) -> EngineSettings:
        """The engine's settings with every `auto` but that of the tasks decided."""
        return resolved(self.engine, self.device.type)
