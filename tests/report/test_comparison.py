"""A comparison's rows, table and picture: every figure, in order, with the best on top."""

import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
from rich.console import Console

from npbml.measures import ACCURACY, ERROR
from npbml.methods import BUILT_IN
from npbml.report.comparison import comparison_rows, comparison_table, comparison_title, milliseconds
from npbml.report.comparison_picture import best_first, draw_comparison


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    plt.close("all")


def row(method: str, value: float = 61.234, measure: str = "accuracy", **changes: Any) -> dict[str, Any]:
    usual = {
        "method": method,
        "protocol": "common",
        "dataset": "glyphs",
        "backbone": "conv4",
        "ways": 5,
        "shots": 1,
        "seed": 0,
        "tasks": 1000,
        measure: value,
        "ci95": 0.456,
        **({"nll": 1.23456, "ece": 3.214} if measure == "accuracy" else {}),
        "start": 41.5,
        "step_ms": 12.34,
        "seconds": {"pretrain": 3600.0, "train": 200.0, "test": 10.0},
        "difference": {"to": "maml", "mean": -1.234, "ci95": 0.1},
    }
    return usual | changes


def printed(rows: list[dict[str, Any]], width: int, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, **options)
    console.print(comparison_table(rows))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_rows_have_the_difference_to_the_first_method_over_common_tasks(tmp_path: Path) -> None:
    results = {"maml": [0.5, 0.7], "gap": [0.6, 0.9, 0.1], "prototypes": [0.4, 0.4]}
    for method, per_task in results.items():
        (tmp_path / method).write_text(json.dumps({"per_task": per_task}))
    records = {method: {"method": method, "accuracy": 0.0} for method in results}
    files = {method: tmp_path / method for method in results}
    rows = comparison_rows(["maml", "sca", "gap"], records, {"sca": "not finite"}, files)
    assert [row["method"] for row in rows] == ["maml", "sca", "gap", "prototypes"]
    assert "difference" not in rows[0] and rows[1] == {"method": "sca", "failed": "not finite"}
    assert rows[2]["difference"] == {
        "to": "maml",
        "mean": pytest.approx(15.0),
        "ci95": pytest.approx(1.96 * 0.5 * 10),  # deviation of 10 and 20, over the root of 2
    }
    assert rows[3]["difference"]["mean"] == pytest.approx(-20.0)


def test_without_the_first_method_there_is_no_difference() -> None:
    rows = comparison_rows(["maml", "gap"], {"gap": {"accuracy": 1.0}}, {"maml": "not finite"}, {})
    assert all("difference" not in row for row in rows)


@pytest.mark.parametrize("width", [80, 100])
def test_a_table_has_every_figure_of_the_longest_methods(width: int) -> None:
    longest = [name for name in BUILT_IN if name != "maml"]
    rows = [row("maml"), *(row(name, accuracy=100.0, ci95=10.456) for name in longest), row("prototypes")]
    for name in ("start", "step_ms", "seconds", "nll", "ece"):
        del rows[-1][name]
    rows[1] |= {"step_ms": 12345.6, "seconds": {"train": 360_000.0}}
    rows[1]["difference"] = {"to": "maml", "mean": -12.344, "ci95": 10.006}
    text = printed(rows, width)
    lines = {line.split()[0]: " ".join(line.split()) for line in text.splitlines() if line.strip()}
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    assert all(name in lines for name in longest)
    assert lines[longest[0]] == f"{longest[0]} 41.50 100.00 ± 10.46 -12.34 ± 10.01 1.235 3.21 12346 100 h 0 min"
    assert lines["prototypes"] == "prototypes 61.23 ± 0.46 -1.23 ± 0.10 - -", "as older versions leave it"
    assert lines["maml"].endswith("12.3 3 min 20 s"), "the time of meta-training alone"


def test_a_method_that_failed_has_no_figures() -> None:
    rows = [{"method": "maml", "failed": "not finite"}, row("gap")]
    lines = [line.split() for line in printed(rows, 80).splitlines() if line.strip()]
    assert ["maml", "failed"] in lines
    assert "no method could be trained" in printed(rows[:1], 80)


@pytest.mark.parametrize(
    ("measure", "best"), [("accuracy", "gap"), ("squared error", "maml")], ids=["accuracy", "error"]
)
def test_the_best_row_is_bold(measure: str, best: str) -> None:
    rows = [row("maml", 1.0, measure), row("gap", 2.0, measure), {"method": "sca", "failed": "x"}]
    text = printed(rows, 80, force_terminal=True, color_system="standard")
    bold = [line for line in text.splitlines() if "\x1b[1m" in line and "±" in line]
    assert len(bold) == 1 and f" {best} " in bold[0].replace("\x1b[1m", " ").replace("\x1b[0m", " ")
    assert ("%" in text) == ("NLL" in text) == (measure == "accuracy")


def test_the_title_says_of_what_it_is() -> None:
    assert comparison_title([row("maml"), row("gap")]) == (
        "5-way 1-shot glyphs, conv4, common protocol, seed 0, 1000 test tasks"
    )
    rows = [{"method": "maml", "failed": "x"}, row("gap", tasks=600), row("boil", tasks=1000)]
    assert comparison_title(rows).endswith("600 to 1000 test tasks")
    assert comparison_title([row("maml", dataset="sinusoid", shots=10)]).startswith("10-shot sinusoid,")


def test_the_best_are_first_and_those_without_a_result_last() -> None:
    rows = [row("a", 2.0), {"method": "b", "failed": "x"}, row("c", float("nan")), row("d", 3.0)]
    assert [one["method"] for one in best_first(rows, ACCURACY)] == ["d", "a", "b", "c"]
    rows = [row("a", 2.0, "squared error"), row("d", 3.0, "squared error")]
    assert [one["method"] for one in best_first(rows, ERROR)] == ["a", "d"]


def test_a_picture_has_a_line_for_each_method_with_room_for_its_name() -> None:
    rows = [row(name, 50.0 + place, step_ms=10.0 + place) for place, name in enumerate(BUILT_IN)]
    rows.append(row("prototypes", 40.0))
    del rows[-1]["step_ms"]
    figure = draw_comparison(rows)
    figure.canvas.draw()
    results, costs = figure.axes
    labels = results.get_yticklabels()
    assert [label.get_text() for label in labels] == list(reversed(BUILT_IN))
    boxes = [label.get_window_extent() for label in labels]
    assert all(not one.overlaps(other) for one, other in itertools.pairwise(boxes))
    assert all(box.x0 >= 0 for box in boxes), "a name is cut off"
    assert [bar.get_width() for bar in costs.patches] == [10.0 + place for place in reversed(range(len(BUILT_IN)))]
    assert costs.get_xscale() == "linear"
    assert [text.get_text() for text in results.get_legend().get_texts()] == ["prototypes: 40.00"]
    assert figure.get_suptitle() == comparison_title(rows)


@pytest.mark.parametrize(("slowest", "scale"), [(40.0, "linear"), (90.0, "log"), (5000.0, "log")])
def test_costs_that_differ_much_are_drawn_by_magnitude(slowest: float, scale: str) -> None:
    figure = draw_comparison([row("maml", step_ms=10.0), row("npbml", step_ms=slowest)])
    figure.canvas.draw()
    axis = figure.axes[1]
    assert axis.get_xscale() == scale
    seen = [label.get_window_extent() for label in axis.get_xticklabels() if label.get_text()]
    inside = [box for box in seen if axis.bbox.x0 <= (box.x0 + box.x1) / 2 <= axis.bbox.x1]
    assert inside and all(not one.overlaps(other) for one, other in itertools.pairwise(inside))


def test_what_failed_is_in_the_picture_too() -> None:
    figure = draw_comparison([{"method": "maml", "failed": "x"}, row("gap", 0.5, "squared error")])
    results = figure.axes[0]
    assert [text.get_text() for text in results.texts] == ["failed"] and results.get_legend() is None
    assert results.get_xlabel().startswith("squared error") and "accuracy" not in results.get_xlabel()


@pytest.mark.parametrize(("value", "text"), [(0.1234, "0.1"), (12.34, "12.3"), (99.96, "100.0"), (1234.5, "1234")])
def test_milliseconds_have_three_digits_or_more(value: float, text: str) -> None:
    assert milliseconds(value) == text
