"""The commands, as a user types them: what they print, what they refuse, and that a refusal costs nothing."""

import contextlib
import io
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from npbml.cli import main, screen
from npbml.cli.options import read_configuration
from npbml.cli.stages import run
from npbml.data.store import ClassEntry, Store
from npbml.lab.schema import Config
from npbml.parts import METHODS

SETTINGS = """
ways = 3
queries = 3
device = "cpu"
[net]
filters = 3
[loss]
hidden = 4
[inner]
steps = 2
[pretrain]
steps = 3
batch_size = 4
validate_every = 3
validation_tasks = 2
[scorer]
widths = [2]
pools = 1
[scorer_training]
steps = 2
validate_every = 2
validation_tasks = 2
[train]
steps = 2
validate_every = 2
validation_tasks = 2
[test]
tasks = 4
"""


class Said(NamedTuple):
    code: int
    out: str
    error: str


def command(*arguments: object) -> Said:
    """`npbml ARGUMENTS` in this process."""
    out, error, code = io.StringIO(), io.StringIO(), 0
    handler = signal.getsignal(signal.SIGTERM)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as leave:
            code = int(leave.code or 0)
        finally:
            signal.signal(signal.SIGTERM, handler)
    return Said(code, out.getvalue(), error.getvalue())


@pytest.fixture(scope="session")
def npbml_command() -> Callable[..., Said]:
    """npbml_command("run", "--shots", 5) -> code, out, error"""
    return command


def write_store(folder: Path, last: int = 6) -> Path:
    """A data set of ten classes of six random pictures, the last one of `last`."""
    counts = [6] * 9 + [last]
    images = np.random.default_rng(0).integers(0, 256, (sum(counts), 1, 16, 16), dtype=np.uint8)
    entries, start = [], 0
    for number, count in enumerate(counts):
        split = "train" if number < 4 else "val" if number < 7 else "test"
        entries.append(ClassEntry(f"class {number}", split, start, count))  # type: ignore[arg-type]
        start += count
    Store.write(folder, name="random", images=images, classes=entries, provenance={})
    return folder


@pytest.fixture
def make_store() -> Callable[..., Path]:
    """make_store(folder, last=6) -> the folder, with a data set in it"""
    return write_store


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a data set, a settings file and a run that is done."""
    folder = tmp_path_factory.mktemp("place")
    write_store(folder / "random")
    (folder / "small.toml").write_text(SETTINGS)
    said = command(
        "run", "--config", folder / "small.toml", "--dataset", folder / "random", "--run", folder / "done"
    )
    assert said.code == 0, said.error
    (folder / "said.txt").write_text(said.out, encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder to work in, 80 columns, and no recipes but those that are built in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NPBML_DATA", str(tmp_path / ".data"))
    monkeypatch.setattr(screen.console, "width", 80)
    yield
    for name in [name for name in METHODS if not METHODS.part(name).built_in]:
        del METHODS.parts[name]


@pytest.fixture
def given(shared: Path) -> tuple[object, ...]:
    """The options of the small run, in the folder `run`."""
    return ("--config", shared / "small.toml", "--dataset", shared / "random", "--run", "run")


@pytest.fixture
def settled() -> Callable[..., Config]:
    """settled("--shots", 5) -> the settings of `npbml run --shots 5`"""
    return lambda *arguments: read_configuration(run, [str(argument) for argument in arguments]).config
