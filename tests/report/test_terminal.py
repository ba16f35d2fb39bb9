"""What a run shows: tables that fit a terminal with no figure cut off, bars, and lines where there is none."""

import io
import re
from typing import Any

import pytest
from rich.console import Console, RenderableType

from npbml.lab.schema import Config
from npbml.measures import Figure
from npbml.report.terminal import Terminal, results_table, settings_table
from npbml.report.words import best_of, duration
from npbml.settings import describe


def shown(what: RenderableType, width: int = 80) -> str:
    """The text of a table, which keeps to the width."""
    console = Console(file=io.StringIO(), width=width)
    console.print(what)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    return text


def record(method: str, **changes: Any) -> dict[str, Any]:
    usual = {
        "method": method,
        "protocol": "published",
        "dataset": "tiered-imagenet",
        "backbone": "resnet12",
        "ways": 5,
        "shots": 5,
        "seed": 12345,
        "tasks": 10_000,
        "accuracy": 61.234,
        "ci95": 0.456,
        "nll": 1.23456,
        "ece": 12.344,
        "seconds": {"pretrain": 3600.0, "relation": 60.0, "train": 7200.0, "test": 1e6},
    }
    return usual | changes


def nothing(method: str, other: str, dataset: str) -> None:
    return None


def test_a_results_table_has_every_figure() -> None:
    asked: list[tuple[str, str, str]] = []

    def difference(method: str, other: str, dataset: str) -> Figure:
        asked.append((method, other, dataset))
        return Figure(-12.344, 10.006) if other == "maml" else Figure(3.456, 0.1)

    names = ["npbml-quirks", "maml", "prototypes"]
    records = [record(name, accuracy=accuracy) for name, accuracy in zip(names, (100, 61.234, 5.5), strict=True)]
    text = shown(results_table(records, difference))
    assert asked == [("npbml-quirks", other, "tiered-imagenet") for other in names[1:]]
    assert " ".join(text.split()).startswith(
        "5-way 5-shot tiered-imagenet, resnet12, published protocol, seed 12345 npbml-quirks is method"
    )
    first, second, third = (next(row for row in text.splitlines() if row.startswith(f"{name} ")) for name in names)
    assert "100.00 ± 0.46 " in first and "+" not in first
    assert "61.23 ± 0.46 " in second and "-12.34 ± 10.01" in second
    assert "5.50 ± 0.46 " in third and "+3.46 ± 0.10" in third
    assert all(" ".join(row.split()).endswith(" 1.235 12.34 10000 3 h 1 min") for row in (first, second, third))
    assert "NLL  ECE, %" in text


def test_old_records_have_a_dash_for_what_they_do_not_know_of_the_probabilities() -> None:
    old = {name: value for name, value in record("maml").items() if name not in ("nll", "ece")}
    text = shown(results_table([record("npbml", nll=87.25, ece=100.0), old], nothing))
    first, second = (
        next(row for row in text.splitlines() if row.startswith(name)) for name in ("npbml ", "maml ")
    )
    assert " 87.25 100.00 10000 " in " ".join(first.split()) and " ± 0.46 - - 10000 " in " ".join(second.split())


def test_a_results_table_without_pairs_leaves_their_place_empty() -> None:
    text = shown(results_table([record("npbml"), record("maml")], nothing))
    assert text.count("61.23 ± 0.46 ") == 2 and "npbml is" in text and "above by" in text and "None" not in text


def test_the_best_method_is_bold() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard")
    console.print(results_table([record("npbml", accuracy=40.0), record("maml", accuracy=50.0)], nothing))
    rows = {
        name: row for row in console.file.getvalue().splitlines() for name in ("npbml ", "maml ") if name in row
    }  # type: ignore[attr-defined]
    assert "\x1b[1m" in rows["maml "] and "\x1b[1m" not in rows["npbml "].replace("above", "")


def error_record(method: str, error: float) -> dict[str, Any]:
    about = {"dataset": "sinusoid", "backbone": "mlp", "shots": 10, "squared error": error, "ci95": 0.01234}
    return {name: value for name, value in record(method, **about).items() if name != "accuracy"}


def test_of_squared_errors_the_smallest_is_the_best() -> None:
    records = [error_record("npbml", 0.5), error_record("maml", 0.25), error_record("metasgd", float("nan"))]
    text = shown(results_table(records, lambda *_: Figure(0.25, 0.1)))
    assert "10-shot sinusoid, mlp" in " ".join(text.split()) and "-way" not in text and "%" not in text
    assert "squared error" in text and "below by" in text and "NLL" not in text and "ECE" not in text
    row = next(line for line in text.splitlines() if line.startswith("maml "))
    assert "0.2500 ± 0.0123" in row and "-0.2500 ± 0.1000" in row  # npbml's error is above maml's
    assert best_of(records) is records[1]
    assert best_of([error_record("maml", float("nan"))]) is None


def test_a_record_that_lacks_something_leaves_its_place_empty() -> None:
    """As older versions, or a test without training, leave it."""
    bare = {name: value for name, value in record("maml").items() if name not in ("seconds", "tasks")}
    del bare["accuracy"], bare["ci95"], bare["nll"]
    text = shown(results_table([record("npbml"), bare], nothing))
    row = next(line for line in text.splitlines() if line.startswith("maml "))
    assert row.split() == ["maml", "-", "-"]


@pytest.mark.parametrize("dataset", ["/pictures/[bold]/x", "/pictures/[/bold]", "/pictures/[red"])
def test_a_folder_with_brackets_is_shown_as_it_is(dataset: str) -> None:
    assert f"5-shot {dataset}, resnet12" in shown(results_table([record("npbml", dataset=dataset)], nothing))


def test_a_settings_table_has_every_setting_in_full() -> None:
    rows = describe(Config)
    text = shown(settings_table(rows))
    words = text.split()
    for name, takes, default in rows:
        assert name in words
        assert all(word in words for word in takes.split())
        assert all(str(part) in words for part in (default if isinstance(default, tuple) else (default,)))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (0.4, "0 s"),
        (45, "45 s"),
        (59.6, "1 min 0 s"),
        (200, "3 min 20 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 0 min"),
        (7500, "2 h 5 min"),
        (360_000, "100 h 0 min"),
    ],
)
def test_a_duration_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def stage(terminal: Terminal) -> None:
    """A stage of ten steps, resumed at the fourth, and a stage that was done before."""
    with terminal:
        terminal.begin("npbml", 10, 4)
        for step in range(5, 11):
            terminal.stepped(step, {"loss": 12.3456 - step})
        terminal.validated(10, "61.23 %")
        terminal.end("best 70.00 % on validation, at step 5")
        terminal.begin("relation", 7, 7)
        terminal.end("done before: best 50.00 % on validation")
        with terminal.counting("test npbml", 30) as tick:
            tick(10)
            tick(20)


def test_without_a_terminal_there_is_a_line_for_each_validation() -> None:
    console = Console(file=io.StringIO(), width=80)
    stage(Terminal(console))
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "npbml: step 10, loss 2.346, validation 61.23 %",
        "npbml: best 70.00 % on validation, at step 5",
        "relation: done before: best 50.00 % on validation",
    ]


def test_a_validation_before_the_first_step_is_the_start() -> None:
    console = Console(file=io.StringIO(), width=80)
    terminal = Terminal(console)
    terminal.begin("maml", 10, 0)
    terminal.validated(0, "33.33 %")
    assert console.file.getvalue() == "maml: step 0, start, validation 33.33 %\n"  # type: ignore[attr-defined]


def bars(console: Console) -> list[str]:
    """The last state of the screen, without colours and movements of the cursor."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())  # type: ignore[attr-defined]
    return [line.rstrip() for line in re.split(r"[\r\n]+", plain) if line.strip()]


def test_on_a_terminal_bars_have_the_steps_the_figures_and_the_time() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    stage(Terminal(console))
    *_, npbml, relation, test = bars(console)
    assert all(len(line) <= 80 for line in bars(console))
    assert npbml.startswith("npbml ") and "10/10" in npbml and "/s" in npbml
    assert "loss 2.346" in npbml and "val 61.23 %" in npbml and re.search(r"\d\d:\d\d$", npbml)
    assert relation.startswith("relation ") and "7/7" in relation and "done before" in relation
    assert "/s" not in relation
    assert test.startswith("test npbml") and "30/30" in test


def test_a_long_run_fits_eighty_columns() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    terminal = Terminal(console)
    with terminal:
        terminal.begin("npbml-quirks", 200_000, 0)
        terminal.stepped(100_000, {"loss": 12.345})
        terminal.validated(100_000, "100.00 %")
        terminal.progress.refresh()
        line = bars(console)[-1]
    for part in ("npbml-quirks", "100000/200000", "loss 12.345", "val 100.00 %"):
        assert part in line
    assert len(line) <= 80


def test_the_rate_counts_the_steps_of_this_process_alone() -> None:
    """Resumed at step 1,000,000, six steps in a moment are not a million a second."""
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    terminal = Terminal(console)
    moments = iter([float(second) for second in range(1000)])
    terminal.progress.get_time = lambda: next(moments)
    with terminal:
        terminal.begin("maml", 2_000_000, 1_000_000)
        terminal.stepped(1_000_006, {"loss": 1.0})
        task = terminal.progress.tasks[0]
        elapsed = task.elapsed
        rate = terminal.progress.columns[3].render(task)  # type: ignore[attr-defined]
    assert elapsed is not None and 0 < float(rate.plain.removesuffix("/s")) <= 6 / elapsed


def test_more_bars_than_the_screen_has_lines_make_room_for_the_last() -> None:
    console = Console(file=io.StringIO(), width=80, height=8, force_terminal=True)
    terminal = Terminal(console)
    with terminal:
        for number in range(12):
            terminal.begin(f"method-{number}", 3, 0)
            terminal.stepped(3, {"loss": 1.0})
        names = [task.description for task in terminal.progress.tasks if task.visible]
        assert names == [f"method-{number}" for number in range(6, 12)]
    assert all(task.visible for task in terminal.progress.tasks)
    assert [line.split()[0] for line in bars(console)[-12:]] == [f"method-{number}" for number in range(12)]


def test_a_failure_is_told_when_it_happens() -> None:
    console = Console(file=io.StringIO(), width=80)
    Terminal(console).failed("gap[x]")
    assert console.file.getvalue() == "gap[x]: failed\n"  # type: ignore[attr-defined]
