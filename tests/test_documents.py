"""What the documents say of the settings is so."""

import re
from pathlib import Path

import pytest

from npbml.lab.schema import Config
from npbml.settings import describe

DOCUMENT = Path(__file__).parent.parent / "docs" / "method.md"
ROWS = re.findall(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)


def test_every_open_point_has_a_row() -> None:
    assert [int(number) for number, _, _ in ROWS] == list(range(1, 37))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"item {row[0]}")
def test_a_row_names_settings_that_exist(row: tuple[str, str, str]) -> None:
    known = {name for name, _, _ in describe(Config)}
    named = re.findall(r"`([a-z_.]+)`", row[2])
    assert named and set(named) <= known


def test_every_setting_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """The help text has a line on each setting, beside its default."""
    from npbml.cli import main

    with pytest.raises(SystemExit):
        main(["run", "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for name, _, _ in describe(Config):
        option = name.replace("_", "-")
        described = re.search(rf"--{re.escape(option)} (\S+ )*?[A-Za-z(][^(]*\(", text)
        assert described, f"{name} is not explained"
