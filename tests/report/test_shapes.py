"""Results by shape, in a terminal, in documents and as a picture."""

import io
from typing import Any

from rich.console import Console

from npbml.report.shapes import draw_shapes, shapes_markdown, shapes_table
from npbml.shapes import USUAL


def row(accuracy: float) -> dict[str, Any]:
    return {"accuracy": accuracy, "ci95": 0.51, "nll": 0.9, "ece": 2.04, "per_task": [0.5]}


FOUND: dict[str, dict[str, Any]] = {
    "npbml-any": {shape: row(60.0 + place) for place, shape in enumerate(USUAL)},
    "maml-any": {shape: row(50.0 + place) for place, shape in enumerate(USUAL)},
    "prototypes": {"5x1": row(55.5), "5x1+75": {"refused": "too few images"}},
    "soft k-means": {"5x1": row(55.5)},
}


def test_the_table_fits_a_terminal_and_has_every_figure() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(shapes_table(FOUND))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert set(USUAL) <= set(lines)
    assert "60.0 ± 0.5 (2.0)" in lines["5x1"] and "55.5 ± 0.5 (2.0)" in lines["5x1"]
    assert lines["5x1+75"].split()[-2:] == ["-", "-"]


def test_the_table_of_documents_has_two_digits() -> None:
    lines = shapes_markdown(FOUND)
    assert lines[0] == "| shape | npbml-any | maml-any | prototypes | soft k-means |" and len(lines) == 2 + len(
        USUAL
    )
    assert (
        lines[2] == "| 5x1 | 60.00 ± 0.51 (2.0) | 50.00 ± 0.51 (2.0) | 55.50 ± 0.51 (2.0) | 55.50 ± 0.51 (2.0) |"
    )


def test_the_picture_shows_each_method_against_pool_ways_shots_and_balance() -> None:
    figure = draw_shapes(FOUND)
    pools, ways, shots, balance = figure.axes

    def points(axis: Any) -> list[int]:
        return [len(container.lines[0].get_xdata()) for container in axis.containers]

    assert points(pools) == [6, 6, 1, 1]  # 0, 5, 15, 75, 300 and 1,000 items
    assert points(ways) == [5, 5]
    assert points(shots) == [2, 2, 2, 2, 1, 1]  # with and without a pool
    assert points(balance) == [4, 4]
