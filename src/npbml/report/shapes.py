"""Results by the shape of tasks: a table, and a picture."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.table import Table

from npbml.report.drawing import ACCENT, INK, QUIET, new_figure, plain
from npbml.report.words import NONE
from npbml.shapes import Shape, read_shape

Found = Mapping[str, Mapping[str, Any]]  # by method, then by shape: figures
COLOURS = (ACCENT, INK, QUIET, "#edae49", "#00798c", "#6a4c93")
LEGEND = (
    "5x1+75: 5 classes, 1 labelled image of each, a pool of 75 unlabelled ones; ~: not balanced. Images of the "
    "pool are predicted too; without a pool each query is predicted by itself."
)


def shape_rows(found: Found, digits: int = 1) -> list[dict[str, str]]:
    """What stands in the table: a row for each shape, with each method's accuracy and calibration error."""
    shapes = dict.fromkeys(shape for figures in found.values() for shape in figures)
    return [
        {"shape": shape, **{name: _cell(figures.get(shape, {}), digits) for name, figures in found.items()}}
        for shape in shapes
    ]


def _cell(figures: Mapping[str, Any], digits: int) -> str:
    if "accuracy" not in figures:
        return NONE
    return f"{figures['accuracy']:.{digits}f} ± {figures['ci95']:.{digits}f} ({figures['ece']:.1f})"


def shapes_table(found: Found) -> Table:
    """For a terminal."""
    table = Table(
        title="accuracy ± 95 % interval (calibration error), %, by the shape of tasks",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        pad_edge=False,
        caption=LEGEND,
        caption_justify="left",
    )
    table.add_column("shape", no_wrap=True)
    for name in found:
        table.add_column(name, justify="right")
    for row in shape_rows(found):
        table.add_row(*row.values())
    return table


def shapes_markdown(found: Found) -> list[str]:
    """For documents."""
    rows = [["shape", *found], ["---"] * (1 + len(found)), *(list(row.values()) for row in shape_rows(found, 2))]
    return [f"| {' | '.join(row)} |" for row in rows]


def draw_shapes(found: Found) -> Figure:
    """Accuracy against the size of the pool, the number of classes, of shots, and the pool's balance."""
    figure = new_figure((11, 3.2), layout="constrained")
    pools, ways, shots, balance = figure.subplots(1, 4)
    for place, (name, figures) in enumerate(found.items()):
        known = {read_shape(text): row for text, row in figures.items() if "accuracy" in row}
        look = {"color": COLOURS[place % len(COLOURS)], "label": name}
        _line(pools, known, [s for s in known if _is(s, ways=5, shots=1)], lambda s: s.pool, look)
        _line(
            ways,
            known,
            [s for s in known if _is(s, s.ways, shots=1) and s.pool == 15 * s.ways],
            lambda s: s.ways,
            look,
        )
        _line(shots, known, [s for s in known if _is(s, ways=5) and s.pool == 75], lambda s: s.shots, look)
        alone = [s for s in known if _is(s, ways=5) and not s.pool]
        _line(shots, known, alone, lambda s: s.shots, {**look, "ls": "--", "label": None})
        _line(balance, known, [s for s in known if s.ways == 5 and s.pool == 75], _balance, look)
    pools.set_xscale("symlog", linthresh=5)
    pools.set_xticks([0, 5, 15, 75, 300, 1000], ["0", "5", "15", "75", "300", "1000"], fontsize=7)
    pools.set_ylabel("accuracy, %")
    balance.set_xticks(range(4), ["1-shot", "1-shot\nunbalanced", "5-shot", "5-shot\nunbalanced"], fontsize=7)
    for axis, words in (
        (pools, "unlabelled items, 5-way 1-shot"),
        (ways, "classes, 1-shot, 15 unlabelled each"),
        (shots, "shots, 5-way; dashed: no pool"),
        (balance, "5-way, pool of 75"),
    ):
        axis.set_xlabel(words, fontsize=8)
        plain(axis)
    handles, labels = pools.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False, fontsize=9)
    return figure


def _is(shape: Shape, ways: int, shots: int | None = None) -> bool:
    """Whether a shape is an even one of these ways and shots."""
    return shape.equal and shape.ways == ways and shots in (None, shape.shots)


def _balance(shape: Shape) -> int:
    return 2 * (shape.shots == 5) + shape.unequal_pool


def _line(
    axis: Axes, known: Mapping[Shape, Any], shapes: Sequence[Shape], place: Any, look: dict[str, Any]
) -> None:
    shapes = sorted((s for s in shapes if not s.unequal_shots), key=place)
    points = [(place(s), known[s]["accuracy"], known[s]["ci95"]) for s in shapes]
    if points:
        x, y, interval = zip(*points, strict=True)
        axis.errorbar(x, y, yerr=interval, marker="o", ms=3.5, lw=1.3, capsize=2, **look)
