"""The picture of a table: ours and the paper's figure of each cell."""

import base64
from collections.abc import Sequence
from io import BytesIO

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from npbml.lab.paper import TableCell
from npbml.measures import Figure as Result
from npbml.report.drawing import ACCENT, INK, QUIET, new_figure, plain
from npbml.report.tables import Line

COLOURS = (ACCENT, INK, "#edae49", "#00798c", "#7768ae")


def draw_table(lines: Sequence[Line]) -> Figure:
    """Each cell that has results, in a row: the paper's figure in grey, ours in a colour for each protocol."""
    found = [line for line in lines if line.results]
    cells = list(dict.fromkeys(line.cell for line in found))
    protocols = list(dict.fromkeys(line.protocol for line in found))
    figure = new_figure((9, 1.5 + 0.3 * len(cells)), layout="constrained")
    axis = figure.subplots()
    for row, cell in enumerate(cells):
        _draw_point(axis, row, cell.paper, "the paper", QUIET, "D")
    for line in found:
        number = protocols.index(line.protocol)
        place = cells.index(line.cell) + 0.16 * (number - (len(protocols) - 1) / 2)
        _draw_point(axis, place, line.ours, line.protocol, COLOURS[number % len(COLOURS)], "o")
    axis.set_yticks(range(len(cells)), list(map(_label, cells)))
    axis.set_ylim(len(cells) - 0.4, -0.6)
    axis.set_xlabel("accuracy, %, and its 95 % interval")
    handles = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))  # each once
    figure.legend(handles.values(), handles, loc="outside upper right", ncols=3, frameon=False, fontsize=8)
    plain(axis)
    return figure


def _draw_point(axis: Axes, place: float, figure: Result | None, label: str, colour: str, mark: str) -> None:
    if figure:
        axis.errorbar(figure.mean, place, xerr=figure.ci95, fmt=mark, ms=5, capsize=2.5, color=colour, label=label)


def picture_of(lines: Sequence[Line]) -> str:
    """The picture as an address that holds it."""
    figure, file = draw_table(lines), BytesIO()
    figure.savefig(file, format="png", dpi=130)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _label(cell: TableCell) -> str:
    return f"{cell.system}, {cell.dataset}, {cell.backbone}, {cell.shots}-shot"
