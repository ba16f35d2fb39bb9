"""What is measured of a method: accuracy, or squared error."""

from dataclasses import dataclass
from typing import NamedTuple


class Figure(NamedTuple):
    """A mean, and the half-width of its 95 % interval over tasks."""

    mean: float
    ci95: float


@dataclass(frozen=True)
class Measure:
    """What is measured of a task's predictions, and what is better."""

    name: str
    scale: float
    lower: bool
    form: str

    def better(self, one: float, other: float) -> bool:
        """Whether a value is better than another."""
        return one < other if self.lower else one > other

    def show(self, value: float) -> str:
        """A value with its unit."""
        return self.form.format(value)


ACCURACY = Measure("accuracy", 100, False, "{:.2f} %")
ERROR = Measure("squared error", 1, True, "{:.4f}")
MEASURES = {"classes": ACCURACY, "values": ERROR}
