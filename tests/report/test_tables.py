"""Our results beside the paper's: averages, differences, and the three ways to show them."""

import base64
import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from npbml.lab.paper import paper_tables
from npbml.lab.reproduce import Result, read_results
from npbml.measures import Calibration, Figure
from npbml.report.tables import LEGEND, lines_of, markdown, sections, summary, terminal_tables
from npbml.report.tables_page import html

BLANK: dict[str, Any] = {
    "method": "npbml",
    "variation": "",
    "dataset": "cifar-fs",
    "backbone": "conv4",
    "shots": 1,
    "protocol": "published",
    "seed": 0,
    "tasks": 1000,
    "accuracy": 66.0,
    "ci95": 0.6,
}


def result(**given: Any) -> Result:
    return Result(**BLANK | given)


SEEDS = [result(), result(seed=1, accuracy=67.0, ci95=0.8), result(seed=2, accuracy=68.0, tasks=600, ci95=0.0)]
OTHER = result(protocol="common", accuracy=60.0)
CHANGED = result(changed="train.steps=5, net.widths=[1, 2]", accuracy=50.0)
SUPPORT = result(method="npbml-1", variation="support", dataset="mini-imagenet", shots=5, accuracy=40.0)
GLYPHS = result(dataset="glyphs", accuracy=80.0)
ALL = [*SEEDS, OTHER, CHANGED, SUPPORT, GLYPHS]


def rows(text: str, heading: str) -> list[dict[str, str]]:
    """The Markdown table below a heading."""
    _, _, rest = text.partition(f"## {heading}")
    table = [line for line in rest.partition("\n## ")[0].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert len({len(line) for line in cells}) == 1 and set(cells[1]) == {"---"}
    return [dict(zip(cells[0], line, strict=True)) for line in cells[2:]]


def test_seeds_are_averaged_and_their_spread_is_told() -> None:
    [line] = lines_of([result().cell], SEEDS)
    texts = line.texts()
    assert texts["ours"] == "67.00 ± 0.33 (2.00)"  # (0.36 + 0.64 + 0) ** 0.5 / 3
    assert (texts["seeds"], texts["tasks"]) == ("3", "600 to 1000")
    assert lines_of([result().cell], SEEDS[:1])[0].texts()["ours"] == "66.00 ± 0.60"


def test_scores_alone_are_shown_where_every_seed_has_them() -> None:
    scored = [replace(seed, scores=Figure(70.0 + n, 0.4)) for n, seed in enumerate(SEEDS[:2])]
    [line] = lines_of([result().cell], scored)
    assert line.texts()["scores alone"] == "70.50 ± 0.28"  # (0.16 + 0.16) ** 0.5 / 2
    [line] = lines_of([result().cell], [*scored, SEEDS[2]])
    assert line.texts()["scores alone"] == "-"
    for results, shown in ((scored, True), (SEEDS, False)):  # no column that says nothing
        assert all(("scores alone" in row) == shown for row in rows(markdown(results), "Table 2"))
        assert ("<th>scores alone</th>" in html(results)) == ("scores alone" in summary(results)[2]) == shown


def calibrated(nll: float, ece: float, **given: Any) -> Result:
    return result(**given, calibration=Calibration(nll, ece))


def test_calibration_has_a_table_of_its_own_where_it_is_known() -> None:
    """A cell that stands in several tables of the paper is there once; old results have no line."""
    assert not any("ECE" in text for text in (markdown(ALL), html(ALL), "\n".join(summary(ALL))))
    scores = {"scores": Figure(70.0, 0.4), "scores_calibration": Calibration(0.5, 2.0)}
    both = {"method": "npbml", "dataset": "mini-imagenet", "shots": 5}  # in tables 1 and 3
    found = [
        calibrated(0.9, 3.0, **scores),
        calibrated(1.0, 4.0, seed=1, **scores),
        calibrated(12.3, 50.0, **both),
    ]
    table = rows(markdown([*found, OTHER, GLYPHS]), "Calibration")
    assert [(row["data set"], row["protocol"], row["NLL"], row["ECE, %"], row["seeds"]) for row in table] == [
        ("mini-imagenet", "published", "12.30", "50.00", "1"),
        ("cifar-fs", "published", "0.950", "3.50", "2"),
    ]
    assert [row["scores alone, NLL"] for row in table] == ["-", "0.500"]
    assert [
        dict(zip(Page(html(found)).tables[-1][0], row, strict=True)) for row in Page(html(found)).tables[-1][1:]
    ] == table
    assert "Calibration" not in markdown([*found[:2], result(seed=2)]), "one of the seeds does not say it"
    assert any("| 0.950 | 3.50 |" in line for line in summary(found))


def test_the_difference_is_to_the_papers_figure() -> None:
    cell = next(cell for cell in paper_tables()["table2"].cells if cell.key == result().cell.key)
    [line] = lines_of([cell], [result(ci95=0.6)])
    assert line.texts()["paper"] == "64.90 ± 0.94"
    assert line.texts()["ours minus paper"] == "+1.10 ± 1.12"


def test_protocols_and_changed_settings_are_kept_apart() -> None:
    table = rows(markdown(ALL), "Table 2")
    mine = [
        row for row in table if (row["method"], row["data set"], row["network"]) == ("npbml", "cifar-fs", "conv4")
    ]
    ours = {row["protocol"]: row["ours"] for row in mine if row["shots"] == "1"}
    assert ours == {"published": "67.00 ± 0.33 (2.00)", "common": "60.00 ± 0.60", "published [1]": "50.00 ± 0.60"}
    assert markdown(ALL).rstrip().endswith("[1]: with train.steps=5, net.widths=[1, 2].")


def test_every_cell_is_in_the_document_and_empty_ones_are_marked() -> None:
    text = markdown([])
    for name, table in paper_tables().items():
        found = rows(text, f"Table {name[-1]}")
        assert [row["row"] for row in found] == [cell.system for cell in table.cells]
        assert {row["ours"] for row in found} == {row["ours minus paper"] for row in found} == {"-"}
    assert "\u2014" not in text and LEGEND in text


def test_a_variation_has_its_own_row_and_no_figure_of_the_paper() -> None:
    table = {row["row"]: row for row in rows(markdown(ALL), "Table 3")}
    assert table["(1) support"]["ours"] == "40.00 ± 0.60" and table["(1) support"]["paper"] == "-"
    assert table["(1)"]["ours"] == "-" and table["(1)"]["paper"] == "65.38 ± 0.67"


def test_results_that_are_in_no_table_are_shown_last() -> None:
    [row] = rows(markdown(ALL), "In no table of the paper")
    assert (row["data set"], row["ours"], row["paper"]) == ("glyphs", "80.00 ± 0.60", "-")
    assert list(sections(SEEDS)) == [table.title for table in paper_tables().values()]


class Page(HTMLParser):
    """The tables of a page, its pictures, and what it would load from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.images: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert tag not in ("script", "link") and "href" not in given
        if tag == "img":
            self.images.append(given["src"] or "")
        if tag not in ("img", "meta"):
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data


def test_the_page_holds_the_same_tables_and_its_pictures() -> None:
    page, text = Page(html(ALL)), markdown(ALL)
    assert page.open == []
    for (title, _), table in zip(sections(ALL).items(), page.tables, strict=True):
        assert [dict(zip(table[0], row, strict=True)) for row in table[1:]] == rows(text, title)
    assert len(page.images) == 3  # of tables 2 and 3, and of the others
    for address in page.images:
        kind, _, content = address.partition(",")
        assert kind == "data:image/png;base64"
        with Image.open(io.BytesIO(base64.b64decode(content))) as picture:
            assert min(picture.size) > 150 and len(picture.convert("L").getcolors(10**6)) > 20


def test_a_page_without_results_has_no_pictures() -> None:
    page = Page(html([]))
    assert page.images == [] and len(page.tables) == 4


LONGEST = {
    "method": "npbml",
    "dataset": "mini-imagenet",
    "shots": 5,
    "backbone": "resnet12-wide",
    "changed": "a=1",
}


@pytest.mark.parametrize(
    "results",
    [ALL, [result(method="npbml", dataset="mini-imagenet", shots=5)], [calibrated(12.3, 50.0, **LONGEST)]],
)
def test_the_terminal_shows_what_has_results_in_eighty_columns(results: list[Result]) -> None:
    console = Console(width=80, file=io.StringIO())
    console.print(terminal_tables(results))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 80
    assert ("12.30 50.00" in text) == ("Calibration" in text) == any(one.calibration for one in results)
    shown = re.findall(r"\d\d\.\d\d ± \d\.\d\d", text)
    assert len(shown) == sum(bool(line.results) for lines in sections(results).values() for line in lines)


def test_the_summary_has_the_cells_of_npbml_alone() -> None:
    lines = summary(ALL)
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + 16 + 2  # of one cell there are three protocols
    assert any("cifar-fs | conv4 | 1 | published | 67.00 ± 0.33 (2.00) | 3 |" in line for line in table)
    assert lines[-1].startswith("[1]: with train.steps=5")
    assert not any("resnet12-wide" in line for line in table)  # neither the paper's nor ours
    wide = summary([result(method="npbml", backbone="resnet12-wide")])
    assert sum("resnet12-wide" in line for line in wide) == 1
    assert summary([]) == summary([SUPPORT]) and "yet" in summary([])[0] and len(summary([])) == 1


def test_the_readme_of_the_results_shows_them_as_they_are() -> None:
    """`python docs/refresh.py results results` puts them there."""
    root = Path(__file__).parents[2]
    _, _, rest = (root / "results" / "README.md").read_text(encoding="utf-8").partition("refresh.py results -->\n")
    shown, end, _ = rest.partition("\n<!-- end of results -->")
    assert end and shown == "\n".join(
        summary(read_results(root / "results") if (root / "results").is_dir() else [])
    )
