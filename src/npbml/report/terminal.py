"""What a run shows in a terminal: progress bars and tables."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from npbml.engine.evaluate import Accuracy
from npbml.stages.loop import Observer


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
        self.progress.stop()

    def begin(self, stage: str, steps: int, done: int) -> None:
        self.stage, self.loss, self.validation = stage, "", ""
        self.bar = self.progress.add_task(stage, total=steps, completed=done, figures="", start_at=done)

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        self.loss = f"loss {metrics['loss']:.3f}"
        self._update(completed=step)

    def validated(self, step: int, accuracy: float, best: float) -> None:
        self.validation = f"val {accuracy:.1f} %"
        self._update(completed=step)
        if not self.console.is_terminal:
            self.console.print(f"{self.stage}: step {step}, {self.loss or 'start'}, validation {accuracy:.2f} %")

    def end(self, note: str) -> None:
        self._update()
        if not self.console.is_terminal:
            self.console.print(f"{self.stage}: {note}")
        elif "before" in note:
            self.validation = "done before"
            self._update()

    @contextmanager
    def counting(self, what: str, total: int) -> Iterator["Counter"]:
        """A bar that is advanced by what the block calls."""
        counter = Counter(self.progress, self.progress.add_task(what, total=total, figures="", start_at=0))
        yield counter
        self.progress.update(counter.bar, completed=self.progress.tasks[counter.bar].total)

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
    records: Sequence[Mapping[str, Any]], paired_difference: Callable[[str, str, str], Accuracy | None]
) -> Table:
    """Accuracy of every method, and what the first is above the others on the same tasks."""
    first = records[0]
    table = Table(
        title=Text(
            f"{first['ways']}-way {first['shots']}-shot {first['dataset']}, {first['backbone']}, "
            f"{first['protocol']} protocol, seed {first['seed']}"
        ),
        title_justify="left",
    )
    best = max(records, key=lambda record: record["accuracy"])
    table.add_column("method")
    table.add_column("accuracy, %", justify="right")
    table.add_column(f"{first['method']} is above by", justify="right")
    table.add_column("tasks", justify="right")
    table.add_column("trained in", justify="right")
    for record in records:
        difference = None
        if record is not first:
            difference = paired_difference(first["method"], record["method"], record["dataset"])
        trained = sum(time for stage, time in record["seconds"].items() if stage != "test")
        table.add_row(
            record["method"],
            f"{record['accuracy']:.2f} ± {record['ci95']:.2f}",
            f"{difference.mean:+.2f} ± {difference.ci95:.2f}" if difference else "",
            str(record["tasks"]),
            duration(trained),
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


def methods_table(summaries: Mapping[str, str]) -> Table:
    table = Table(box=None, header_style="bold")
    table.add_column("method", no_wrap=True)
    table.add_column("what it is")
    for name, summary in summaries.items():
        table.add_row(name, summary)
    return table


def labels_table(names: Sequence[str], classes: Sequence[Any], probabilities: np.ndarray) -> Table:
    """The label of each picture with its probability."""
    table = Table(box=None, header_style="bold")
    table.add_column("picture", overflow="fold")
    table.add_column("label", overflow="fold")
    table.add_column("probability", justify="right")
    for name, row in zip(names, probabilities, strict=True):
        table.add_row(Text(name), Text(str(classes[row.argmax()])), f"{row.max():.3f}")
    return table


def duration(seconds: float) -> str:
    """Seconds in words: 45 s, 3 min 20 s, 2 h 5 min."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60} min"
