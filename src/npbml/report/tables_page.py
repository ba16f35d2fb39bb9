"""The paper's tables beside ours as one HTML page."""

from collections.abc import Sequence
from html import escape

from npbml.lab.reproduce import Result
from npbml.report.tables import (
    CALIBRATION_COLUMNS,
    CALIBRATION_LEGEND,
    CALIBRATION_TITLE,
    LEGEND,
    Line,
    calibrated_lines,
    columns_of,
    notes,
    sections,
)
from npbml.report.tables_picture import picture_of

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b3a4b; max-width: 75rem; margin: 2rem auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .7rem; text-align: left; border-bottom: 1px solid #dde3e8; white-space: nowrap; }
tr.none { color: #8d99ae; }
img { max-width: 100%; margin: 1rem 0; }
"""


def html(results: Sequence[Result]) -> str:
    """One page with every table and its picture, and nothing that lies elsewhere."""
    parts = []
    for title, lines in sections(results).items():
        parts += [f"<h2>{escape(title)}</h2>", _html_table(lines)]
        if any(line.results for line in lines):
            parts.append(f'<img alt="{escape(title)}, ours and the paper\'s" src="{picture_of(lines)}">')
    found = calibrated_lines(line for lines in sections(results).values() for line in lines)
    if found:
        rows = [_row("td", list(line.calibration_row().values())) for line in found]
        parts += [f"<h2>{CALIBRATION_TITLE}</h2>", f"<p>{escape(CALIBRATION_LEGEND)}</p>"]
        parts.append("\n".join(["<table>", _row("th", CALIBRATION_COLUMNS), *rows, "</table>"]))
    title = "The paper's tables, and ours"
    return "\n".join(
        [
            f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>',
            f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n<p>{escape(LEGEND)}</p>",
            *parts,
            *(f"<p>{escape(note)}</p>" for note in notes(results)),
            "</body>\n</html>\n",
        ]
    )


def _html_table(lines: Sequence[Line]) -> str:
    columns = columns_of(lines)
    rows = [_row("th", columns)]
    for line in lines:
        texts = line.texts()
        rows.append(_row("td", [texts[name] for name in columns], "" if line.results else ' class="none"'))
    return "\n".join(["<table>", *rows, "</table>"])


def _row(cell: str, texts: Sequence[str], attributes: str = "") -> str:
    cells = "".join(f"<{cell}>{escape(text)}</{cell}>" for text in texts)
    return f"<tr{attributes}>{cells}</tr>"
