"""A small data set of random pictures, and runs on it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npbml.data.store import ClassEntry, Store
from npbml.lab.pipeline import Pipeline
from npbml.lab.protocols import preset
from npbml.lab.schema import Config, override
from npbml.parts import METHODS

SMALL: dict[str, Any] = {
    "ways": 3,
    "queries": 3,
    "device": "cpu",
    "net": {"filters": 3},
    "loss": {"hidden": 4},
    "inner": {"steps": 2},
    "pretrain": {"steps": 3, "batch_size": 4, "validate_every": 3, "validation_tasks": 2, "validation_shots": 1},
    "scorer": {"widths": [2], "pools": 1},
    "scorer_training": {"steps": 2, "validate_every": 2, "validation_tasks": 2},
    "train": {"steps": 2, "validate_every": 2, "validation_tasks": 2},
    "test": {"tasks": 4},
    "engine": {"tasks": "vmap"},
}


def write_store(folder: Path, counts: tuple[int, ...] = (6,) * 10) -> Path:
    """A data set of random pictures: four classes to train, three to validate, the others to test."""
    images = np.random.default_rng(0).integers(0, 256, (sum(counts), 1, 16, 16), dtype=np.uint8)
    entries, start = [], 0
    for number, count in enumerate(counts):
        split = "train" if number < 4 else "val" if number < 7 else "test"
        entries.append(ClassEntry(f"class {number}", split, start, count))  # type: ignore[arg-type]
        start += count
    Store.write(folder, name="random", images=images, classes=entries, provenance={})
    return folder


@pytest.fixture(scope="session")
def make_store() -> Callable[..., Path]:
    """make_store(folder, counts=(6,) * 10) -> the folder, with a data set in it"""
    return write_store


@pytest.fixture(scope="session")
def small() -> dict[str, Any]:
    """The settings of a run of seconds."""
    return SMALL


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """The settings of a small run."""
    dataset = write_store(tmp_path_factory.mktemp("data") / "random")
    return override(preset("quick"), {**SMALL, "dataset": str(dataset)})


@pytest.fixture(scope="session")
def done(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """A run that has trained and tested everything."""
    run = Pipeline.start(tmp_path_factory.mktemp("runs") / "done", config)
    for stage in ("pretrain", "relation", "npbml", "maml"):
        run.run(stage)
    for method in ("npbml", "maml", "prototypes"):
        run.test(method)
    return run


@pytest.fixture(scope="session")
def contents() -> Callable[[Path], dict[Path, bytes]]:
    """contents(folder) -> what is in the files below it"""

    def read(folder: Path) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}

    return read


@pytest.fixture(autouse=True)
def built_in_methods() -> Iterator[None]:
    """No methods but those that are built in, before and after each test."""
    yield
    for name in [name for name in METHODS if not METHODS.part(name).built_in]:
        del METHODS.parts[name]
