"""The paper's tables beside ours: in Markdown, in HTML and in a terminal."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import hypot

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from npbml.lab.paper import TableCell, paper_tables
from npbml.lab.reproduce import Result
from npbml.measures import ACCURACY, Calibration, Figure
from npbml.report.words import CALIBRATION, NONE, calibration_texts, with_interval

LEGEND = (
    "Accuracy in percent on tasks of the test classes. Ours is the mean of the seeds, with the 95 % interval over "
    "the test tasks of all of them; where there are several seeds, the best is above the worst by what stands in "
    "brackets. Scores alone are those of query images that the learner's loss is given, with no learner. The "
    "column tasks has the number for each seed. The interval of a difference is that of two independent figures."
)
SCORES = "scores alone"
COLUMNS = (
    *("row", "method", "data set", "network", "shots", "protocol"),
    *("ours", SCORES, "seeds", "tasks", "paper"),
)
DIFFERENCE = "ours minus paper"
CALIBRATION_TITLE = "Calibration"
CALIBRATION_LEGEND = (
    "How good the probabilities are, over all query images of all test tasks: the negative log-likelihood (NLL), "
    "in nats, and the expected calibration error (ECE) in percent, over 15 equal bins of the highest probability. "
    "Less is better. Ours is the mean of the seeds; the paper has no such figures."
)
CALIBRATION_COLUMNS = (*COLUMNS[:6], *CALIBRATION, *(f"{SCORES}, {name}" for name in CALIBRATION), "seeds")


@dataclass(frozen=True)
class Line:
    """A cell, and our results for it under one protocol; there may be none."""

    cell: TableCell
    protocol: str = NONE
    results: tuple[Result, ...] = ()

    @property
    def ours(self) -> Figure | None:
        """The mean of the seeds, and its interval over the tasks of all of them."""
        return over_seeds([Figure(result.accuracy, result.ci95) for result in self.results])

    @property
    def scores(self) -> Figure | None:
        """The same of the scores alone, where every result has them."""
        found = [result.scores for result in self.results if result.scores]
        return over_seeds(found) if len(found) == len(self.results) else None

    @property
    def calibration(self) -> Calibration | None:
        """The means of the seeds, where every result has them."""
        return mean_calibration([result.calibration for result in self.results])

    @property
    def scores_calibration(self) -> Calibration | None:
        """The same of the scores alone."""
        return mean_calibration([result.scores_calibration for result in self.results])

    @property
    def difference(self) -> Figure | None:
        """Ours minus the paper's."""
        ours, paper = self.ours, self.cell.paper
        if ours is None or paper is None:
            return None
        return Figure(ours.mean - paper.mean, hypot(ours.ci95, paper.ci95))

    @property
    def spread(self) -> str:
        """How far the seeds are apart, in brackets, where there are several."""
        found = [result.accuracy for result in self.results]
        return f" ({max(found) - min(found):.2f})" if len(found) > 1 else ""

    @property
    def tasks(self) -> str:
        counts = sorted({result.tasks for result in self.results})
        return " to ".join(map(str, dict.fromkeys([counts[0], counts[-1]]))) if counts else NONE

    def texts(self) -> dict[str, str]:
        """What stands in each column."""
        cell, seeds = self.cell, len(self.results)
        where = (cell.system, cell.name, cell.dataset, cell.backbone, str(cell.shots), self.protocol)
        ours = shown(self.ours) + self.spread
        values = (*where, ours, shown(self.scores), str(seeds or NONE), self.tasks, shown(cell.paper))
        return dict(zip(COLUMNS, values, strict=True)) | {DIFFERENCE: shown(self.difference, signed=True)}

    def calibration_row(self) -> dict[str, str]:
        """What stands in each column of the table of calibration."""
        texts = self.texts()
        figures = (*calibration_texts(self.calibration), *calibration_texts(self.scores_calibration))
        values = (*(texts[name] for name in COLUMNS[:6]), *figures, texts["seeds"])
        return dict(zip(CALIBRATION_COLUMNS, values, strict=True))


def mean_calibration(found: Sequence[Calibration | None]) -> Calibration | None:
    """The mean of each figure, where all are known."""
    known = [one for one in found if one is not None]
    if not known or len(known) < len(found):
        return None
    return Calibration(*(sum(figures) / len(known) for figures in zip(*known, strict=True)))


def over_seeds(figures: Sequence[Figure]) -> Figure | None:
    """Their mean, and its interval over the tasks of all."""
    if not figures:
        return None
    mean = sum(figure.mean for figure in figures) / len(figures)
    return Figure(mean, hypot(*(figure.ci95 for figure in figures)) / len(figures))


def shown(figure: Figure | None, signed: bool = False) -> str:
    return with_interval(ACCURACY, *figure, signed=signed) if figure else NONE


def mean(figure: Figure | None, signed: bool = False) -> str:
    return f"{figure.mean:{'+' if signed else ''}.2f}" if figure else NONE


def lines_of(cells: Iterable[TableCell], results: Sequence[Result]) -> list[Line]:
    """A line for each cell and protocol that has results, and an empty one for a cell that has none.

    Results of other protocols, or with other changes in one, are never averaged together.
    """
    lines, marks = [], _marks(results)
    for cell in cells:
        groups: dict[str, list[Result]] = {}
        for result in results:
            if result.cell.key == cell.key:
                groups.setdefault(result.protocol + marks[result.changed], []).append(result)
        lines += [Line(cell, protocol, tuple(group)) for protocol, group in groups.items()] or [Line(cell)]
    return lines


def _marks(results: Iterable[Result]) -> dict[str, str]:
    """A number in brackets for each set of changed settings."""
    changes = dict.fromkeys(result.changed for result in results if result.changed)
    return {"": ""} | {changed: f" [{number}]" for number, changed in enumerate(changes, 1)}


def notes(results: Iterable[Result]) -> list[str]:
    """What the numbers in brackets behind a protocol stand for."""
    return [f"{mark.strip()}: with {changed}." for changed, mark in _marks(results).items() if changed]


def sections(results: Sequence[Result]) -> dict[str, list[Line]]:
    """The lines of each table by its title; last, where there are any, of results that are in no table."""
    tables = paper_tables().values()
    found = {table.title: lines_of(table.cells, results) for table in tables}
    known = {cell.key for table in tables for cell in table.cells}
    others = dict.fromkeys(result.cell for result in results if result.cell.key not in known)
    return found | ({"In no table of the paper": lines_of(others, results)} if others else {})


def calibrated_lines(lines: Iterable[Line]) -> list[Line]:
    """Those of which it is known how good the probabilities are; a cell that is in several tables, once."""
    once: dict[object, Line] = {}
    for line in lines:
        once.setdefault((line.cell.key, line.protocol), line)
    return [line for line in once.values() if line.calibration]


def markdown(results: Sequence[Result]) -> str:
    """One document with every table."""
    parts = ["# The paper's tables, and ours", LEGEND]
    for title, lines in sections(results).items():
        parts += [f"## {title}", "\n".join(markdown_table(lines, columns_of(lines)))]
    found = calibrated_lines(line for lines in sections(results).values() for line in lines)
    if found:
        parts += [f"## {CALIBRATION_TITLE}", CALIBRATION_LEGEND, "\n".join(calibration_markdown(found))]
    return "\n\n".join([*parts, *notes(results)]) + "\n"


def columns_of(lines: Sequence[Line]) -> list[str]:
    """The columns of a table; that of the scores is there if one line has them."""
    scored = any(line.scores for line in lines)
    return [name for name in (*COLUMNS, DIFFERENCE) if scored or name != SCORES]


def markdown_table(lines: Sequence[Line], columns: Sequence[str]) -> list[str]:
    return _markdown([line.texts() for line in lines], columns)


def calibration_markdown(lines: Sequence[Line]) -> list[str]:
    return _markdown([line.calibration_row() for line in lines], CALIBRATION_COLUMNS)


def _markdown(texts: Sequence[Mapping[str, str]], columns: Sequence[str]) -> list[str]:
    rows = [[row[name].replace("|", "\\|") for name in columns] for row in texts]
    return [f"| {' | '.join(row)} |" for row in [list(columns), ["---"] * len(columns), *rows]]


def summary(results: Sequence[Result]) -> list[str]:
    """The cells of NPBML alone that the paper has or we have, as lines of Markdown."""
    cells = [
        cell for name in ("table1", "table2") for cell in paper_tables()[name].cells if cell.method == "npbml"
    ]
    used = [result for line in lines_of(cells, results) for result in line.results]
    if not used:
        return ["None of NPBML's cells in Tables 1 and 2 has been run with `npbml reproduce` yet."]
    below = [part for note in notes(used) for part in ("", note)]
    lines = [line for line in lines_of(cells, used) if line.results or line.cell.paper]
    columns = [name for name in columns_of(lines) if name not in ("row", "method")]
    found = calibrated_lines(lines)
    calibration = ["", CALIBRATION_LEGEND, "", *calibration_markdown(found)] if found else []
    return ["NPBML, 5-way. " + LEGEND, "", *markdown_table(lines, columns), *calibration, *below]


def terminal_tables(results: Sequence[Result]) -> RenderableType:
    """The cells that have results."""
    parts: list[RenderableType] = []
    for title, lines in sections(results).items():
        found = [line for line in lines if line.results]
        if found:
            parts += [Text(title), terminal_table(found), ""]
    calibrated = calibrated_lines(line for lines in sections(results).values() for line in lines)
    if calibrated:
        parts += [Text(CALIBRATION_TITLE), terminal_calibration(calibrated), ""]
    return Group(*parts, *map(Text, notes(results)))


def terminal_table(lines: Sequence[Line]) -> Table:
    table = plain_table("row", "data set", "net", "shots", "protocol", "ours", "seeds", "paper", "minus\npaper")
    for line in lines:
        texts = line.texts()
        table.add_row(
            *(Text(texts[name]) for name in ("row", "data set", "network", "shots", "protocol")),
            shown(line.ours),
            texts["seeds"],
            mean(line.cell.paper),
            mean(line.difference, signed=True),
        )
    return table


def terminal_calibration(lines: Sequence[Line]) -> Table:
    """How good the probabilities are; those of the scores alone stand in the documents."""
    table = plain_table("row", "data set", "net", "shots", "protocol", *CALIBRATION, "seeds")
    for line in lines:
        texts = line.calibration_row()
        names = ("row", "data set", "network", "shots", "protocol", *CALIBRATION, "seeds")
        table.add_row(*(Text(texts[name]) for name in names))
    return table


def plain_table(*columns: str) -> Table:
    """An empty table that is as narrow as it can be."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for name in columns:
        table.add_column(name, overflow="fold", no_wrap=name in ("row", "data set", "ours"))
    return table
