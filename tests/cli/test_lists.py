"""What the lists of methods and settings show."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from npbml.cli import screen
from npbml.lab.schema import Config
from npbml.methods import BUILT_IN, Cell
from npbml.report.methods import shown
from npbml.settings import describe, flat

Npbml = Callable[..., Any]


@pytest.mark.parametrize("width", [80, 100])
def test_methods_are_listed(npbml_command: Npbml, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr(screen.console, "width", width)
    said = npbml_command("methods")
    assert said.code == 0 and max(map(len, said.out.splitlines())) <= width and "…" not in said.out
    names = [line.split()[0] for line in said.out.partition("\n\n")[0].splitlines() if line[0] != " "]
    assert names == ["method", *BUILT_IN]


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_method_is_shown_with_its_settings(npbml_command: Npbml, name: str) -> None:
    said = npbml_command("methods", name)
    words = " ".join(said.out.split())
    assert said.code == 0 and words.startswith(f"{name}: {BUILT_IN[name].summary}")
    for table in (BUILT_IN[name].rule, BUILT_IN[name].published(Cell())):
        for setting, value in flat(table).items():
            assert f"{setting} {shown(value)}" in words


def test_published_settings_are_those_of_a_cell(npbml_command: Npbml) -> None:
    assert "train.steps 80000" in " ".join(npbml_command("methods", "gap").out.split())
    said = npbml_command("methods", "gap", "--dataset", "tiered-imagenet", "--shots", 5)
    words = " ".join(said.out.split())
    assert "(tiered-imagenet, conv4, 5 shots)" in words and "train.steps 200000" in words


def test_a_recipe_of_ones_own_is_shown_too(npbml_command: Npbml, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('summary = "mine [x]"\nbase = "gap"\n[inner]\nlayers = "body"\n')
    said = npbml_command("methods", "mine.toml")
    words = " ".join(said.out.split())
    assert said.code == 0 and words.startswith("mine: mine [x] learns initialisation + a spectrum")
    assert "adapts tail, 5 steps" in words and "inner.layers body" in words and "precondition.chain svd" in words


def test_an_unknown_method_is_answered_with_the_names(npbml_command: Npbml) -> None:
    said = npbml_command("methods", "mamml")
    assert (
        said.code == 2 and "There is no method 'mamml'. Did you mean 'maml'? Choose from npbml, maml" in said.error
    )


def test_settings_are_listed_as_the_arguments_make_them(npbml_command: Npbml) -> None:
    said = npbml_command("settings", "--inner.steps", "77", "--protocol", "published")
    rows = {line.split()[0]: line.split()[1] for line in said.out.splitlines() if len(line.split()) > 1}
    assert said.code == 0 and rows["inner.steps"] == "77" and rows["train.steps"] == "30000"
    assert all(name in said.out.split() for name, _, _ in describe(Config))
