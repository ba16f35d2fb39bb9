"""The paper's tables: their cells, and the figures that the paper has for them."""

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from npbml.measures import Figure

# What a variation changes in the settings of a cell. Variants 1 and 2 are told apart from the gain of seeing the
# query images: each has a row, not one of the paper's, whose inner loop sees the support batch alone.
VARIATIONS: dict[str, dict[str, Any]] = {"": {}, "support": {"inner": {"batch": "support"}}}
VARIED = {"table3": ("npbml-1", "npbml-2")}
# NPBML with ResNet-12 has a row for the wider one as well, which others have and the paper has not.
WIDER = {("npbml", "resnet12"): "resnet12-wide"}


@dataclass(frozen=True)
class TableCell:
    """One figure of a table: a row's system on a data set, with a network and a number of shots."""

    system: str
    """What the paper calls it; (1) to (10) are the ablations."""
    method: str
    """What npbml calls it. Variants that are the same are the same method, and run once."""
    dataset: str
    backbone: str
    shots: int
    paper: Figure | None = None
    """What the paper reports, where it does."""
    variation: str = ""

    @property
    def name(self) -> str:
        """The method with its variation, as --methods takes it."""
        return f"{self.method}-{self.variation}" if self.variation else self.method

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """What a result is found by; the same cell may stand in two tables."""
        return self.method, self.variation, self.dataset, self.backbone, self.shots


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper."""

    title: str
    cells: tuple[TableCell, ...]


@cache
def paper_tables() -> dict[str, PaperTable]:
    """The four tables by name, each with its cells in the paper's order."""
    known = json.loads((files("npbml.lab") / "paper_results.json").read_text("utf-8"))
    return {
        name: PaperTable(
            f"Table {name.removeprefix('table')}: {table['title']}",
            tuple(cell for row in table["rows"] for cell in _cells(row, VARIED.get(name, ()))),
        )
        for name, table in known.items()
    }


def _cells(row: dict[str, Any], varied: tuple[str, ...]) -> list[TableCell]:
    cells = []
    for dataset, by_shots in row["figures"].items():
        for shots, figure in by_shots.items():
            where = (row["method"], dataset, row["backbone"], int(shots))
            cells.append(TableCell(row["system"], *where, Figure(*figure) if figure else None))
            if row["method"] in varied:
                cells.append(TableCell(f"{row['system']} support", *where, variation="support"))
    wider = WIDER.get((row["method"], row["backbone"]))
    return cells + [replace(cell, backbone=wider, paper=None) for cell in cells if wider]
