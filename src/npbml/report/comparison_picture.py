"""The picture of a comparison."""

from collections.abc import Sequence
from textwrap import fill

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from npbml.measures import Measure
from npbml.methods import trains
from npbml.report.comparison import Row, comparison_title, milliseconds
from npbml.report.drawing import ACCENT, INK, QUIET, new_figure, plain
from npbml.report.words import heading, measure_of


def draw_comparison(rows: Sequence[Row]) -> Figure:
    """Each method's result with its interval, the best on top, and beside it the time of a meta-step.

    A method that trains nothing is a line: what the encoder is worth without a rule. At least one method has been
    tested.
    """
    measure = measure_of(next(row for row in rows if "failed" not in row))
    order = best_first([row for row in rows if trains(row["method"])], measure)
    figure = new_figure((9, 1.7 + 0.24 * len(order)), layout="constrained")
    results, costs = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
    _draw_results(results, order, measure)
    _draw_costs(costs, order)
    for row in rows:
        if not trains(row["method"]) and measure.name in row:
            value = row[measure.name]
            results.axvline(value, color=QUIET, ls="--", lw=1.2, label=f"{row['method']}: {value:.2f}")
            results.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize=8, borderaxespad=0.1)
    results.set_yticks(range(len(order)), [row["method"] for row in order])
    results.set_ylim(len(order) - 0.4, -0.6)
    figure.suptitle(fill(comparison_title(rows), 110), fontsize=10)
    return figure


def best_first(rows: Sequence[Row], measure: Measure) -> list[Row]:
    """The rows by result, those without one last."""
    sign = 1 if measure.lower else -1
    values = [sign * row.get(measure.name, np.nan) for row in rows]
    return [rows[place] for place in np.argsort(values, kind="stable")]  # which puts NaN last


def _draw_results(axis: Axes, order: Sequence[Row], measure: Measure) -> None:
    for place, row in enumerate(order):
        if "failed" in row:
            across = axis.get_yaxis_transform()
            axis.text(0.02, place, "failed", transform=across, va="center", color=ACCENT, backgroundcolor="white")
            continue
        colour = INK if place else ACCENT
        axis.errorbar(row[measure.name], place, xerr=row["ci95"], fmt="o", ms=5, capsize=2.5, color=colour)
    axis.set_xlabel(f"{heading(measure)}, and its 95 % interval over tasks")
    plain(axis)


def _draw_costs(axis: Axes, order: Sequence[Row]) -> None:
    costs = {place: row["step_ms"] for place, row in enumerate(order) if "step_ms" in row}
    axis.barh(list(costs), list(costs.values()), color=QUIET, height=0.62)
    spread = max(costs.values()) / min(costs.values())
    if spread > 5:
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if spread < 30 else (1,)))
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.xaxis.set_minor_formatter(NullFormatter())
    for place, cost in costs.items():
        axis.annotate(
            milliseconds(cost), (cost, place), (3, 0), textcoords="offset points", va="center", fontsize=7
        )
    axis.margins(x=0.18)
    axis.tick_params(left=False)
    axis.set_xlabel("ms for a meta-step")
    plain(axis)
