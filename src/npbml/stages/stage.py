"""A trained stage of a run, as a value."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npbml.errors import RunError
from npbml.json_files import read_json
from npbml.measures import ACCURACY, Measure


@dataclass(frozen=True)
class Stage:
    """One trained stage of a run, as a value: the one place that says all about it.

    Everything else follows: where it is kept, when it is skipped, what it resumes from, what runs before it.
    """

    name: str  # of its folder in the run
    weights: str  # the file, in that folder, that it leaves behind
    fingerprint: str  # of all that its outcome depends on: a checkpoint made with another one is refused
    after: tuple[str, ...]  # the stages that must be done before it, in their order
    command: str  # that runs it
    steps: int
    validate_every: int
    make_trainer: Callable[[], Any]  # a Trainer (stages/loop.py)
    measure: Measure = ACCURACY
    keep: int = 1  # states, the best ones

    def file(self, folder: Path, rank: int = 0) -> Path:
        """Where the best state, of rank 0, and those after it are left in a run folder."""
        path = Path(self.weights)
        return folder / self.name / (self.weights if rank == 0 else f"{path.stem}-{rank + 1}{path.suffix}")

    def done(self, folder: Path) -> bool:
        """Whether the stage has ended in a run folder."""
        return (folder / self.name / "done.json").is_file() and self.file(folder).is_file()

    def summary(self, folder: Path) -> dict[str, Any]:
        """What the stage has left to be known of it, in a run folder in which it has ended."""
        if not self.done(folder):
            raise RunError(
                f"{folder / self.name} is not finished: run `npbml {self.command} --run {folder}` first."
            )
        summary = read_json(folder / self.name / "done.json")
        if summary.get("fingerprint") != self.fingerprint:
            raise RunError(
                f"{folder / self.name} was made with other settings than this run's: choose another --run."
            )
        return summary
