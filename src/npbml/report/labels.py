"""The labels of pictures: tables for the terminal, and files for other programs."""

import csv
import io
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from npbml.errors import SettingError
from npbml.json_files import write_whole
from npbml.version import __version__

ENDINGS = (".csv", ".json")
WIDEST = 10  # classes of which a whole confusion table fits into 80 columns
PAIRS = 10  # of classes that are most often confused, where there are more


@dataclass(frozen=True)
class Row:
    """A picture and its label.

    Attributes:
        name: Of the file, below the folder of pictures.
        label: The class, or unknown.
        probabilities: Of each class.
    """

    name: str
    label: str
    probabilities: Sequence[float]

    @property
    def best(self) -> float:
        """The probability of the most probable class."""
        return max(self.probabilities)


def printable(path: str | os.PathLike[str]) -> str:
    r"""Return a file name as text that can be written anywhere: bytes that are not UTF-8 become \xff."""
    return os.fsencode(path).decode("utf-8", errors="backslashreplace")


def one_line(text: str) -> str:
    r"""Return text for a line of a terminal: control characters are written as \n, \x1b and so on."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def labels_table(rows: Iterable[Row]) -> Table:
    """The label of each picture with its probability."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("picture", overflow="fold")
    table.add_column("label", overflow="fold")
    table.add_column("probability", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(Text(one_line(row.name)), Text(one_line(row.label)), f"{row.best:.3f}")
    return table


def counts_table(rows: Sequence[Row], classes: Sequence[str]) -> Table:
    """How many pictures have each label, and how sure the answers are."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("label", overflow="fold")
    table.add_column("pictures", justify="right", no_wrap=True)
    table.add_column("mean probability", justify="right", no_wrap=True)
    members: dict[str, list[float]] = {name: [] for name in classes}
    for row in rows:
        members.setdefault(row.label, []).append(row.best)
    for name, values in members.items():
        mean = f"{sum(values) / len(values):.3f}" if values else "-"
        table.add_row(Text(one_line(name)), f"{len(values):,}", mean)
    return table


def accuracy_words(truth: Sequence[str], labels: Sequence[str], unknown: str) -> str:
    """The accuracy with its 95 % interval by Wilson's formula; of those that are answered, where some are not."""
    answered = [(one, other) for one, other in zip(truth, labels, strict=True) if other != unknown]
    total, right = len(answered), sum(one == other for one, other in answered)
    if not total:
        return f"accuracy: none of the {len(truth):,} pictures in class folders has a label"
    low, high = wilson(right, total)
    words = f"accuracy: {100 * right / total:.1f} %, 95 % interval {100 * low:.1f} to {100 * high:.1f}"
    if total < len(truth):
        share = 100 * total / len(truth)
        return f"{words}, of the {total:,} pictures that have a label: {share:.1f} % of {len(truth):,}"
    return f"{words}, of {total:,} pictures"


def wilson(right: int, total: int, z: float = 1.959964) -> tuple[float, float]:
    """The 95 % interval of a share, which stays within 0 to 1 (Wilson, 1927)."""
    share, more = right / total, z * z / total
    middle = (share + more / 2) / (1 + more)
    half = z * math.sqrt(share * (1 - share) / total + more / (4 * total)) / (1 + more)
    return max(0.0, middle - half), min(1.0, middle + half)


def confusion_table(truth: Sequence[str], labels: Sequence[str], classes: Sequence[str], unknown: str) -> Table:
    """What pictures of each class were taken for: a row for each class, a column for each label, numbered alike.

    Of more than `WIDEST` classes, the pairs that are most often confused.
    """
    counts = Counter(zip(truth, labels, strict=True))
    if len(classes) > WIDEST:
        return _pairs_table(counts)
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("class", overflow="ellipsis", no_wrap=True, max_width=24)
    columns = [*classes, *([unknown] if unknown in labels else [])]
    for number, name in enumerate(columns, 1):
        table.add_column("?" if name == unknown else str(number), justify="right", no_wrap=True)
    table.add_column("right", justify="right", no_wrap=True)
    for number, name in enumerate(classes, 1):
        total = sum(counts[name, other] for other in columns)
        cells = [
            Text(str(count) if (count := counts[name, other]) else ".", "bold" if name == other else "")
            for other in columns
        ]
        share = f"{100 * counts[name, name] / total:.0f} %" if total else "-"
        table.add_row(Text(f"{number} {one_line(name)}"), *cells, share)
    return table


def _pairs_table(counts: Mapping[tuple[str, str], int]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("class", "taken for"):
        table.add_column(name, overflow="ellipsis", no_wrap=True, max_width=30)
    table.add_column("pictures", justify="right", no_wrap=True)
    wrong = sorted((-count, pair) for pair, count in counts.items() if pair[0] != pair[1])
    for count, (name, other) in wrong[:PAIRS]:
        table.add_row(Text(one_line(name)), Text(one_line(other)), str(-count))
    return table


def ignored_words(ignored: Mapping[str, int]) -> str:
    """12 .mp4, 3 .txt, 1 without an ending"""
    ordered = sorted(ignored.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(
        f"{count:,} {one_line(printable(ending)) or 'without an ending'}" for ending, count in ordered
    )


def check_ending(path: Path, endings: Sequence[str] = ENDINGS) -> None:
    """Refuse a file that is to be written in a form that is not known."""
    if path.suffix.lower() not in endings:
        raise SettingError(f"{path} must end in {' or '.join(endings)}.")


def write_labels(path: Path, rows: Sequence[Row], classes: Sequence[str], about: Mapping[str, Any]) -> None:
    """Write every label with all probabilities, as CSV or JSON by the ending of `path`, whole or not at all.

    `about` is written in JSON alone, before the pictures.
    """
    check_ending(path)
    write_whole(
        path, (_csv(rows, classes) if path.suffix.lower() == ".csv" else _json(rows, classes, about)).encode()
    )


def _csv(rows: Sequence[Row], classes: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)  # whose lines end by RFC 4180; with another ending, names with a CR are not quoted
    writer.writerow(["file", "label", "probability", *(f"p({name})" for name in classes)])
    for row in rows:
        writer.writerow([row.name, row.label, _digits(row.best), *map(_digits, row.probabilities)])
    return text.getvalue()


def _json(rows: Sequence[Row], classes: Sequence[str], about: Mapping[str, Any]) -> str:
    pictures = [
        {
            "file": row.name,
            "label": row.label,
            "probability": float(_digits(row.best)),
            "probabilities": {
                name: float(_digits(value)) for name, value in zip(classes, row.probabilities, strict=True)
            },
        }
        for row in rows
    ]
    known = {"npbml": __version__, **about, "classes": list(classes), "pictures": pictures}
    return json.dumps(known, indent=1, ensure_ascii=False) + "\n"


def _digits(value: float) -> str:
    return f"{float(value):.6g}"
