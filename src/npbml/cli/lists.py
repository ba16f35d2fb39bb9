"""The commands that list what there is: methods and settings."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from npbml.cli.options import Nothing, method_name, parse, read_configuration
from npbml.cli.screen import console
from npbml.lab.protocols import preset
from npbml.lab.schema import Config, method_config
from npbml.methods import Cell, find_recipe, trained_methods, trains
from npbml.parts import BACKBONES, DATASETS, HEADS, LOSS_TERMS, METHODS, PRECONDITIONERS, SCORERS
from npbml.report.methods import method_page, method_words, methods_table, parts_table
from npbml.report.terminal import settings_table
from npbml.settings import describe, flat


@dataclass(frozen=True)
class MethodsOptions:
    """Which methods, and published where."""

    name: Annotated[str | None, tyro.conf.Positional] = None
    """One method to be shown with its settings: a name, or the file of a recipe; all of them if not given."""
    dataset: str = "mini-imagenet"
    """The published settings of one method: for this data set,"""
    backbone: str = "conv4"
    """... this network"""
    shots: int = 1
    """... and this number of shots."""


def methods(arguments: list[str]) -> None:
    """List the methods that can be trained: what they learn, adapt and minimise. With a name, show one of them."""
    options = parse(MethodsOptions, "methods", methods, arguments)
    if options.name is None:
        console.print(methods_table({name: _words(name) for name in trained_methods()}))
        console.print("\nThis is the common protocol; `npbml methods NAME` shows the settings of one method.")
        return
    name = method_name(options.name)
    if not trains(name):
        console.print(f"{name}: {find_recipe(name).summary}")
        return
    recipe, cell = find_recipe(name), Cell(options.dataset, options.backbone, options.shots)
    where = f"{cell.dataset}, {cell.backbone}, {cell.shots} {'shot' if cell.shots == 1 else 'shots'}"
    tables = {
        "rule: what it changes in the settings of npbml, under every protocol": flat(recipe.rule),
        f"published: what it changes under that protocol ({where})": flat(recipe.published(cell)),
    }
    console.print(method_page(name, recipe.summary, _words(name), tables))


def parts(arguments: list[str]) -> None:
    """List the parts that methods and runs are made of, by name: built-in ones and those of plugins."""
    parse(Nothing, "parts", parts, arguments)
    for registry in (METHODS, BACKBONES, HEADS, LOSS_TERMS, PRECONDITIONERS, SCORERS, DATASETS):
        console.print(parts_table(registry))


def _words(method: str) -> dict[str, str]:
    """Under the common protocol, where methods differ in the rule alone."""
    return method_words(method_config(preset("common", method=method), method).learner)


def settings(arguments: list[str]) -> None:
    """List every setting: its name, its default and what it takes."""
    console.print(settings_table(describe(Config, read_configuration(settings, arguments).config)))
