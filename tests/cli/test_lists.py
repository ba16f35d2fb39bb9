"""What the lists of methods and settings show."""

from collections.abc import Callable
from typing import Any

from npbml.config import Config
from npbml.methods import RECIPES
from npbml.settings import describe

Npbml = Callable[..., Any]


def test_methods_are_listed(npbml_command: Npbml) -> None:
    said = npbml_command("methods")
    assert said.code == 0 and all(name in said.out.split() for name in RECIPES)


def test_settings_are_listed_as_the_arguments_make_them(npbml_command: Npbml) -> None:
    said = npbml_command("settings", "--inner.steps", "77", "--protocol", "published")
    rows = {line.split()[0]: line.split()[1] for line in said.out.splitlines() if len(line.split()) > 1}
    assert said.code == 0 and rows["inner.steps"] == "77" and rows["train.steps"] == "30000"
    assert all(name in said.out.split() for name, _, _ in describe(Config))
