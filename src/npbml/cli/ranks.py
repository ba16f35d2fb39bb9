"""Of several processes, one writes to the screen."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from npbml.engine.distributed import world


@contextmanager
def one_speaks() -> Iterator[None]:
    """Of several ranks, have the first alone write to the screen."""
    if world()[0] == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield
