"""What is measured of a method: accuracy, or squared error."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class Figure(NamedTuple):
    """A mean, and the half-width of its 95 % interval over tasks."""

    mean: float
    ci95: float


class Calibration(NamedTuple):
    """How good the probabilities of predictions are."""

    nll: float
    """Negative log-likelihood, in nats: the mean over all queries of all tasks."""
    ece: float
    """Expected calibration error in percent, over 15 equal bins of the highest probability."""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Calibration | None":
        """What a record says of it; those of version 0.1, and of values, say nothing."""
        return cls(float(record["nll"]), float(record["ece"])) if {"nll", "ece"} <= record.keys() else None


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
