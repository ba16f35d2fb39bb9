"""Labels as tables and as files."""

import csv
import io
import json
import os
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from npbml.errors import RunError, SettingError
from npbml.report.labels import (
    Row,
    accuracy_words,
    confusion_table,
    counts_table,
    ignored_words,
    labels_table,
    one_line,
    printable,
    wilson,
    write_labels,
)


def shown(table: Table) -> str:
    console = Console(width=80, file=io.StringIO())
    console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 80
    return text


@pytest.mark.parametrize(
    ("pictures", "classes"),
    [
        (["a.png", "b.png"], ["cat", "dog"]),
        (["a[b].png", "[red]x[/red].png"], ["[bold]", "[/bold]"]),
        (["x" * 90 + ".png", "b.png"], ["y" * 60, "z" * 60]),
    ],
)
def test_a_labels_table_has_every_label_and_its_probability(pictures: list[str], classes: list[str]) -> None:
    rows = [Row(pictures[0], classes[1], [0.25, 0.75]), Row(pictures[1], classes[0], [0.9004, 0.0996])]
    text = shown(labels_table(rows))
    first, second = (next(row for row in text.splitlines() if figure in row) for figure in ("0.750", "0.900"))
    assert classes[1][:20] in first and classes[0][:20] in second
    assert not Counter("".join((*pictures, *classes))) - Counter(text), "a letter is cut off"


def test_counts_are_by_label_and_name_classes_without_pictures() -> None:
    rows = [Row("a", "cat", [0.9, 0.1]), Row("b", "cat", [0.7, 0.3]), Row("c", "unknown", [0.5, 0.5])]
    lines = [line.split() for line in shown(counts_table(rows, ["cat", "dog"])).splitlines()]
    assert lines[1:] == [["cat", "2", "0.800"], ["dog", "0", "-"], ["unknown", "1", "0.500"]]


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (50, 100, 0.4038, 0.5962), (1, 3, 0.0615, 0.7923)],
)
def test_wilsons_interval_by_published_values(right: int, total: int, low: float, high: float) -> None:
    assert wilson(right, total) == pytest.approx((low, high), abs=5e-4)


def test_accuracy_is_of_what_has_a_label() -> None:
    truth = ["cat", "cat", "dog", "dog"]
    assert accuracy_words(truth, ["cat", "dog", "dog", "dog"], "unknown").startswith(
        "accuracy: 75.0 %, 95 % interval"
    )
    some = accuracy_words(truth, ["cat", "unknown", "dog", "dog"], "unknown")
    assert some.startswith("accuracy: 100.0 %") and some.endswith("3 pictures that have a label: 75.0 % of 4")
    assert "none of the 4" in accuracy_words(truth, ["unknown"] * 4, "unknown")


def test_a_confusion_table_has_a_row_for_each_class_and_a_column_for_each_label() -> None:
    truth = ["cat", "cat", "dog", "dog", "dog"]
    given = ["cat", "dog", "dog", "dog", "unknown"]
    lines = [
        line.split()
        for line in shown(confusion_table(truth, given, ["cat", "dog", "owl"], "unknown")).splitlines()
    ]
    assert lines[0] == ["class", "1", "2", "3", "?", "right"]
    assert lines[1] == ["1", "cat", "1", "1", ".", ".", "50", "%"]
    assert lines[2] == ["2", "dog", ".", "2", ".", "1", "67", "%"]
    assert lines[3] == ["3", "owl", ".", ".", ".", ".", "-"]


@pytest.mark.parametrize("count", [2, 10, 11, 60])
def test_a_confusion_table_fits_eighty_columns(count: int) -> None:
    classes = [f"{'a long name of a class '}{number}" for number in range(count)]
    truth = [name for name in classes for _ in range(900)]
    text = shown(confusion_table(truth, truth[1:] + truth[:1], classes, "unknown"))
    assert len(text.splitlines()) == 1 + min(count, 10)


AWKWARD = [
    "plain.jpg",
    "a, b.jpg",
    'say "hi".jpg',
    "two\nlines.jpg",
    "cr\r.jpg",
    "é ü 猫.jpg",
    b"caf\xe9.jpg",
    "=1+1.jpg",
]


def test_csv_is_read_back_as_it_was(tmp_path: Path) -> None:
    names = [printable(os.fsdecode(name)) for name in AWKWARD]
    rows = [Row(name, "cat, or so", [0.123456789, 0.876543211]) for name in names]
    write_labels(tmp_path / "a.CSV", rows, ["dog", "cat, or so"], {})
    with open(tmp_path / "a.CSV", newline="", encoding="utf-8") as file:
        head, *lines = csv.reader(file)
    assert head == ["file", "label", "probability", "p(dog)", "p(cat, or so)"]
    assert [line[0] for line in lines] == names and lines[6][0] == "caf\\xe9.jpg"
    assert lines[0][1:] == ["cat, or so", "0.876543", "0.123457", "0.876543"]


def test_json_is_read_back_as_it_was(tmp_path: Path) -> None:
    names = [printable(os.fsdecode(name)) for name in AWKWARD]
    write_labels(tmp_path / "a.json", [Row(name, "x", [0.25, 0.75]) for name in names], ["y", "x"], {"pool": 3})
    read = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert [one["file"] for one in read["pictures"]] == names and read["pool"] == 3
    assert read["pictures"][0] == {
        "file": "plain.jpg",
        "label": "x",
        "probability": 0.75,
        "probabilities": {"y": 0.25, "x": 0.75},
    }


def test_other_endings_are_refused_and_a_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"labels\.xlsx must end in \.csv or \.json"):
        write_labels(tmp_path / "labels.xlsx", [], [], {})
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="could not be saved"):
        write_labels(tmp_path / "file" / "labels.csv", [], [], {})
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_names_are_shown_on_one_line() -> None:
    assert one_line("a\nb\x1b[31m\t é") == "a\\nb\\x1b[31m\\t é"
    assert ignored_words({".txt": 1, ".mp4": 1200, "": 2}) == "1,200 .mp4, 2 without an ending, 1 .txt"
