"""Results in words: names of tasks and measures, figures with intervals, durations."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from npbml.measures import ACCURACY, MEASURES, Calibration, Measure
from npbml.parts import DATASETS


def task_words(dataset: str, ways: int, shots: int) -> str:
    """5-way 1-shot glyphs; of values, which have no classes, 10-shot sinusoid."""
    valued = dataset in DATASETS and DATASETS.fact(dataset, "target") == "values"
    return f"{shots}-shot {dataset}" if valued else f"{ways}-way {shots}-shot {dataset}"


def measure_of(record: Mapping[str, Any]) -> Measure:
    """What was measured of the method that the record is about."""
    return next((measure for measure in MEASURES.values() if measure.name in record), ACCURACY)


def with_interval(measure: Measure, mean: float, ci95: float, signed: bool = False) -> str:
    """61.23 ± 0.46, in the unit of the measure, which is not repeated here."""
    digits = 2 if measure is ACCURACY else 4
    return f"{mean:{'+' if signed else ''}.{digits}f} ± {ci95:.{digits}f}"


def heading(measure: Measure) -> str:
    """The name of the measure, and its unit."""
    return "accuracy, %" if measure is ACCURACY else measure.name


NONE = "-"
CALIBRATION = ("NLL", "ECE, %")  # headings


def calibration_texts(found: Calibration | None) -> tuple[str, str]:
    """What stands below the headings: 0.512 and 3.21, or dashes where nothing is known."""
    if found is None:
        return NONE, NONE
    return f"{found.nll:.{3 if found.nll < 10 else 2}f}", f"{found.ece:.2f}"


def best_of(records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The record with the best result; NaN is none."""
    tested = [record for record in records if not math.isnan(record.get(measure_of(record).name, math.nan))]
    measure = measure_of(records[0] if not tested else tested[0])
    sign = -1 if measure.lower else 1
    return max(tested, key=lambda record: sign * record[measure.name], default=None)


def duration(seconds: float) -> str:
    """Seconds in words: 45 s, 3 min 20 s, 2 h 5 min."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60} min"
