"""Where the commands write."""

import os
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.table import Table

Command = Callable[[list[str]], None]

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)


def say(text: str) -> None:
    """A line of plain text, however long: paths can be copied and searched for."""
    console.print(text, markup=False, soft_wrap=True)


def note(text: str) -> None:
    """A remark beside what a command prints; of several processes, the first makes it."""
    if os.environ.get("RANK", "0") == "0":
        errors.print(f"npbml: {text}", markup=False, soft_wrap=True)


def list_commands(commands: Mapping[str, Command]) -> None:
    """Every command with its docstring."""
    table = Table.grid(padding=(0, 2))
    for name, command in commands.items():
        table.add_row(f"  {name}", (command.__doc__ or "").strip())
    console.print(table)
