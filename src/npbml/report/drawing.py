"""What every plot has in common: figures that no window shows, colours, the look of axes."""

import io
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from npbml.json_files import write_whole

INK, ACCENT, QUIET = "#1b3a4b", "#d1495b", "#8d99ae"


def new_figure(size: tuple[float, float], **how: Any) -> Figure:
    """An empty figure, in inches, that is drawn into memory: pyplot and its backend are left alone."""
    figure = Figure(figsize=size, **how)
    FigureCanvasAgg(figure)
    return figure


def plain(axis: Axes) -> None:
    """The look of every plot."""
    axis.grid(alpha=0.25)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: Path) -> None:
    """Write a picture as its name ends, whole or not at all."""
    content = io.BytesIO()
    figure.savefig(content, dpi=130, format=path.suffix.removeprefix(".") or None)
    write_whole(path, content.getvalue())
