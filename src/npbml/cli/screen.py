"""Where the commands write."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout

from rich.console import Console
from rich.table import Table

from npbml.engine.distributed import world

Command = Callable[[list[str]], None]

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)


def say(text: str) -> None:
    """A line of plain text, however long: paths can be copied and searched for."""
    console.print(text, markup=False, soft_wrap=True)


@contextmanager
def one_speaks() -> Iterator[None]:
    """Of several ranks, have the first alone write to the screen."""
    if world()[0] == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


def list_commands(commands: Mapping[str, Command]) -> None:
    """Every command with its docstring."""
    table = Table.grid(padding=(0, 2))
    for name, command in commands.items():
        table.add_row(f"  {name}", (command.__doc__ or "").strip())
    console.print(table)
