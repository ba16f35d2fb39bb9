"""The commands about data sets."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from npbml.cli.options import Nothing, parse
from npbml.cli.screen import console, list_commands, say
from npbml.errors import SettingError
from npbml.report.terminal import Terminal


@dataclass(frozen=True)
class PrepareOptions:
    """What to make a data set of."""

    name: Annotated[str, tyro.conf.Positional]
    """mini-imagenet, tiered-imagenet, cifar-fs, fc100 or omniglot; or a name for your own pictures."""
    source: str
    """The file or folder that you have downloaded; for your own pictures, a folder of class folders."""
    size: int | None = None
    """Side of the images; the benchmark's own, or 84, if not given."""
    fractions: tuple[float, float, float] = (0.6, 0.2, 0.2)
    """For class folders without train/, val/ and test/: how many of the classes go to each."""
    seed: int = 0
    """... and the seed by which they are dealt."""


@dataclass(frozen=True)
class CheckOptions:
    """Which data set."""

    name: Annotated[str, tyro.conf.Positional]
    """A data set that is prepared, or glyphs."""


@dataclass(frozen=True)
class ShowOptions:
    """Which pictures, and where to."""

    name: Annotated[str, tyro.conf.Positional]
    """A data set that is prepared, or glyphs."""
    split: Literal["train", "val", "test"] = "test"
    """Which classes."""
    classes: int = 10
    """How many of them, one in a row."""
    images: int = 12
    """How many images of each."""
    seed: int = 0
    """Which ones."""
    out: str | None = None
    """The PNG file; NAME-SPLIT.png in this folder if not given."""


def data(arguments: list[str]) -> None:
    """Prepare, check and show data sets: npbml data prepare | check | show | list."""
    actions = {"prepare": data_prepare, "check": data_check, "show": data_show, "list": data_list}
    if not arguments or arguments[0] in ("-h", "--help"):
        console.print(f"{data.__doc__}\n")
        list_commands({f"npbml data {name}": action for name, action in actions.items()})
    elif arguments[0] not in actions:
        raise SettingError(f"There is no `npbml data {arguments[0]}`: choose from {', '.join(actions)}.")
    else:
        actions[arguments[0]](arguments[1:])


def data_prepare(arguments: list[str]) -> None:
    """Make a data set of what you have downloaded, or of a folder of your own pictures."""
    options = parse(PrepareOptions, "data prepare", data_prepare, arguments)
    from npbml.data.prepare import prepare
    from npbml.data.store import SPLITS

    terminal = Terminal(console)
    with terminal, terminal.counting("classes", 1) as tick:
        store = prepare(
            options.name,
            Path(options.source),
            size=options.size,
            fractions=options.fractions,
            seed=options.seed,
            progress=tick.reached,
        )
    counts = ", ".join(f"{sum(entry.split == split for entry in store.entries)} {split}" for split in SPLITS)
    say(f"{store.folder}: {len(store.images)} images of {counts} classes")


def data_check(arguments: list[str]) -> None:
    """Verify a data set: its bytes, its classes and counts against the published ones, and duplicates."""
    options = parse(CheckOptions, "data check", data_check, arguments)
    from npbml.data.check import check
    from npbml.data.sets import open_dataset

    report = check(open_dataset(options.name))
    for line in report.lines:
        say(line)
    if not report.ok:
        sys.exit(1)


def data_show(arguments: list[str]) -> None:
    """Draw a contact sheet of a data set."""
    options = parse(ShowOptions, "data show", data_show, arguments)
    from npbml.data.sets import open_dataset
    from npbml.data.show import contact_sheet

    sheet = contact_sheet(open_dataset(options.name), options.split, options.classes, options.images, options.seed)
    path = Path(options.out or f"{Path(options.name).name}-{options.split}.png")
    sheet.save(path)
    say(str(path))


def data_list(arguments: list[str]) -> None:
    """List the data sets that are there, and what the benchmarks are made of."""
    parse(Nothing, "data list", data_list, arguments)
    from npbml.data.prepare import LAYOUTS
    from npbml.data.sets import prepared
    from npbml.data.store import data_root

    say(f"in {data_root()}: {', '.join(['glyphs', *prepared()])}")
    for name, layouts in LAYOUTS.items():
        console.print(f"{name}: {layouts}", markup=False)
