"""What a run shows in a terminal: progress bars and tables."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from npbml.measures import ACCURACY, Calibration, Figure
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
from npbml.stages.observer import Observer


class Terminal(Observer):
    """Progress bars where there is a terminal, a line for each validation where there is none."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.progress = Progress(
            TextColumn("{task.description:<16}"),
            BarColumn(bar_width=18),
            TextColumn("{task.completed:>6.0f}/{task.total:.0f}"),
            _Rate(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=console,
            disable=not console.is_terminal,
        )
        self.stage, self.loss, self.validation = "", "", ""

    def __enter__(self) -> "Terminal":
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the bars as they are and the screen to others."""
        for task in self.progress.tasks:
            self.progress.update(task.id, visible=True)
        self.progress.stop()

    def begin(self, stage: str, steps: int, done: int) -> None:
        self.stage, self.loss, self.validation = stage, "", ""
        self.bar = self._add(stage, total=steps, completed=done, start_at=done)

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        if "loss" in metrics:
            self.loss = f"loss {metrics['loss']:.3f}"
        self._update(completed=step)

    def validated(self, step: int, value: str) -> None:
        self.validation = f"val {value}"
        self._update(completed=step)
        if not self.console.is_terminal:
            self.console.print(f"{self.stage}: step {step}, {self.loss or 'start'}, validation {value}")

    def said(self, words: str) -> None:
        self.console.print(words, markup=False, soft_wrap=True)

    def end(self, note: str) -> None:
        self._update()
        if not self.console.is_terminal:
            self.console.print(f"{self.stage}: {note}")
        elif note.startswith("done before"):
            self.validation = "done before"
            self._update()

    def failed(self, stage: str) -> None:
        """Say that a stage could not be ended, and leave it."""
        self.console.print(f"{stage}: failed", markup=False)

    @contextmanager
    def counting(self, what: str, total: int) -> Iterator["Counter"]:
        """A bar that is advanced by what the block calls."""
        counter = Counter(self.progress, self._add(what, total=total, start_at=0))
        yield counter
        self.progress.update(counter.bar, completed=self.progress.tasks[counter.bar].total)

    def _add(self, what: str, **fields: Any) -> TaskID:
        """A new bar; where they are more than the screen has lines, the first ones make room until the end."""
        bar = self.progress.add_task(what, figures="", **fields)
        for task in self.progress.tasks[: -max(1, self.console.height - 2)]:
            self.progress.update(task.id, visible=False)
        return bar

    def _update(self, **changes: Any) -> None:
        figures = "  ".join(text for text in (self.loss, self.validation) if text)
        self.progress.update(self.bar, figures=figures, **changes)


class Counter:
    """Moves one bar: called with how many more are done, or told how many of how many have been reached."""

    def __init__(self, progress: Progress, bar: TaskID) -> None:
        self.progress, self.bar = progress, bar

    def __call__(self, count: int) -> None:
        self.progress.advance(self.bar, count)

    def reached(self, done: int, total: int) -> None:
        self.progress.update(self.bar, completed=done, total=total)


class _Rate(ProgressColumn):
    """Steps a second since the stage began here."""

    def render(self, task: Task) -> Text:
        elapsed = task.finished_time or task.elapsed or 0
        done = task.completed - task.fields.get("start_at", 0)
        return Text(f"{done / elapsed:5.1f}/s" if elapsed and done else "")


def results_table(
    records: Sequence[Mapping[str, Any]], paired_difference: Callable[[str, str, str], Figure | None]
) -> Table:
    """The result of every method, and by how much the first is better than the others on the same tasks.

    Of classes with two figures of the probabilities; older records lack them.
    """
    first, best = records[0], best_of(records)
    measure = measure_of(first)
    sign = -1 if measure.lower else 1
    table = Table(
        title=Text(
            f"{task_words(first['dataset'], first['ways'], first['shots'])}, {first['backbone']}, "
            f"{first['protocol']} protocol, seed {first['seed']}"
        ),
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        pad_edge=False,
    )
    calibrated = measure is ACCURACY
    table.add_column("method", overflow="fold")
    table.add_column(heading(measure), justify="right")
    table.add_column(f"{first['method']} is\n{'below' if measure.lower else 'above'} by", justify="right")
    for name in CALIBRATION if calibrated else ():
        table.add_column(name, justify="right")
    table.add_column("tasks", justify="right")
    table.add_column("trained in", justify="right")
    for record in records:
        difference = None
        if record is not first:
            difference = paired_difference(first["method"], record["method"], record["dataset"])
        seconds = [time for stage, time in record.get("seconds", {}).items() if stage != "test"]
        table.add_row(
            record["method"],
            with_interval(measure, record[measure.name], record["ci95"]) if measure.name in record else "",
            with_interval(measure, sign * difference.mean, difference.ci95, signed=True) if difference else "",
            *(calibration_texts(Calibration.of(record)) if calibrated else ()),
            str(record.get("tasks", "")),
            duration(sum(seconds)) if seconds else "",
            style="bold" if record is best else None,
        )
    return table


def settings_table(rows: Sequence[tuple[str, str, Any]]) -> Table:
    """Every setting: name, default, what it takes."""
    table = Table(box=None, header_style="bold")
    table.add_column("setting", no_wrap=True)
    for name in ("default", "takes"):
        table.add_column(name, overflow="fold")
    for name, takes, default in rows:
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
        table.add_row(name, Text(shown), takes)
    return table
