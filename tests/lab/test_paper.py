"""The paper's tables: every cell is there once, and is a method of npbml."""

import pytest

from npbml.data.sets import BENCHMARKS
from npbml.lab.paper import VARIATIONS, TableCell, paper_tables
from npbml.lab.protocols import preset
from npbml.methods import BUILT_IN


def cells_of(name: str) -> list[TableCell]:
    """The paper's own."""
    cells = paper_tables()[name].cells
    return [cell for cell in cells if not cell.variation and cell.backbone != "resnet12-wide"]


# cells, and those among them for which the paper has a figure
COUNTS = {"table1": (68, 53), "table2": (36, 36), "table3": (5, 5), "table4": (5, 5)}


@pytest.mark.parametrize("name", COUNTS)
def test_every_cell_of_a_table_is_there_once(name: str) -> None:
    cells = cells_of(name)
    assert (len(cells), sum(cell.paper is not None for cell in cells)) == COUNTS[name]
    assert len({cell.key for cell in paper_tables()[name].cells}) == len(paper_tables()[name].cells)
    assert all(cell.paper.mean > 20 and 0 < cell.paper.ci95 < 2 for cell in cells if cell.paper)
    assert paper_tables()[name].title.startswith(f"Table {name[-1]}: ")


def test_there_are_four_tables() -> None:
    assert list(paper_tables()) == list(COUNTS)


def test_figures_are_the_papers() -> None:
    known = {cell.key: cell.paper for name in COUNTS for cell in cells_of(name)}
    assert known["npbml", "", "cifar-fs", "conv4", 1] == (64.90, 0.94)
    assert known["npbml", "", "fc100", "resnet12", 5] == (59.85, 0.70)
    assert known["maml", "", "mini-imagenet", "conv4", 5] == (63.11, 0.92)
    assert known["meta-curvature", "", "tiered-imagenet", "wrn28-10", 1] == (64.40, 0.10)
    assert known["tnet", "", "mini-imagenet", "conv4", 5] is None
    assert known["npbml-9", "", "mini-imagenet", "conv4", 5] == (70.04, 0.65)


def test_every_cell_can_be_configured() -> None:
    for name in COUNTS:
        for cell in paper_tables()[name].cells:
            assert cell.method in BUILT_IN and cell.dataset in BENCHMARKS and cell.variation in VARIATIONS
            assert preset("published", cell.dataset, cell.backbone, cell.method, cell.shots).shots == cell.shots


def test_variants_that_are_run_once_are_the_same_method() -> None:
    for cell in cells_of("table3") + cells_of("table4"):
        variant = f"npbml-{cell.system.strip('()')}"
        assert BUILT_IN[variant].rule == BUILT_IN[cell.method].rule
    both = [*cells_of("table1"), *cells_of("table3"), *cells_of("table4")]
    for cell in both:
        assert {other.paper for other in both if other.key == cell.key} == {cell.paper}


@pytest.mark.parametrize("name", ["table1", "table2"])
def test_npbml_has_a_row_with_the_wide_network(name: str) -> None:
    wide, narrow = (
        [
            (cell.method, cell.dataset, cell.shots)
            for cell in paper_tables()[name].cells
            if cell.backbone == network
        ]
        for network in ("resnet12-wide", "resnet12")
    )
    assert wide == [where for where in narrow if where[0] == "npbml"] and len(wide) == 4
    assert not any(cell.paper for cell in paper_tables()[name].cells if cell.backbone == "resnet12-wide")


def test_variants_one_and_two_have_a_row_with_the_support_batch() -> None:
    varied = [cell for cell in paper_tables()["table3"].cells if cell.variation]
    assert [cell.name for cell in varied] == ["npbml-1-support", "npbml-2-support"]
    assert all(cell.paper is None for cell in varied)
