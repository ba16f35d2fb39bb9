"""Methods side by side: what a comparison keeps of each, and the table of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from npbml.lab.records import paired
from npbml.measures import ACCURACY, Calibration, Measure
from npbml.report.words import (
    CALIBRATION,
    best_of,
    calibration_texts,
    duration,
    heading,
    measure_of,
    task_words,
    with_interval,
)

Row = dict[str, Any]


def comparison_rows(
    methods: Sequence[str],
    records: Mapping[str, Mapping[str, Any]],
    failed: Mapping[str, str],
    files: Mapping[str, Path],
) -> list[Row]:
    """The record of each method, in order, then those of others such as prototypes, each with its difference to
    the first method over the tasks that both were given; of a method that failed, the reason.

    `files` hold the result of each task.
    """
    rows: list[Row] = []
    for method in dict.fromkeys([*methods, *records, *failed]):
        row: Row = {"method": method, **records.get(method, {})}
        if method in failed:
            row["failed"] = failed[method]
        elif method != methods[0] and methods[0] in records:
            difference = paired(measure_of(row), files[method], files[methods[0]])
            row["difference"] = {"to": methods[0], "mean": difference.mean, "ci95": difference.ci95}
        rows.append(row)
    return rows


def comparison_title(rows: Sequence[Row]) -> str:
    """Of what the comparison is: data, network, protocol, seed and number of test tasks."""
    tested = [row for row in rows if "failed" not in row]
    if not tested:
        return "no method could be trained"
    first = tested[0]
    tasks = sorted({row["tasks"] for row in tested})
    counts = str(tasks[0]) if len(tasks) == 1 else f"{tasks[0]} to {tasks[-1]}"
    words = task_words(first["dataset"], first["ways"], first["shots"])
    return f"{words}, {first['backbone']}, {first['protocol']} protocol, seed {first['seed']}, {counts} test tasks"


def comparison_table(rows: Sequence[Row]) -> RenderableType:
    """A row for each method: validation at the start, test, difference to the first, of classes two figures of the
    probabilities, and what it costs."""
    measure, best = measure_of(next((row for row in rows if "failed" not in row), {})), best_of(rows)
    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)  # it fills 80 columns
    table.add_column("method", overflow="fold")
    first = rows[0]["method"]
    calibrated = CALIBRATION if measure is ACCURACY else ()
    for name in (
        *("start,\nval.", heading(measure), f"minus\n{first}"),
        *(name.replace(" ", "\n") for name in calibrated),
        *("ms a\nstep", "trained\nin"),
    ):
        table.add_column(name, justify="right")
    for row in rows:
        style = "bold" if row is best else None
        table.add_row(Text(row["method"]), *_cells(row, measure), style=style)
    return Group(Text(comparison_title(rows)), table)


def _cells(row: Row, measure: Measure) -> list[str]:
    if "failed" in row:
        return ["", "failed"]
    difference = row.get("difference")
    seconds = row.get("seconds", {}).get("train")
    digits = 2 if measure is ACCURACY else 4
    return [
        f"{row['start']:.{digits}f}" if "start" in row else "",
        with_interval(measure, row[measure.name], row["ci95"]),
        with_interval(measure, difference["mean"], difference["ci95"], signed=True) if difference else "",
        *(calibration_texts(Calibration.of(row)) if measure is ACCURACY else ()),
        milliseconds(row["step_ms"]) if "step_ms" in row else "",
        duration(seconds) if seconds is not None else "",
    ]


def milliseconds(value: float) -> str:
    """Three digits, or as many as there are before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
