import dataclasses
import os
from collections.abc import Callable

import pytest

from npbml.data.benchmarks import PUBLISHED, Benchmark
from npbml.data.glyphs import glyphs
from npbml.data.store import SPLITS, Store


@pytest.fixture(scope="session")
def glyph_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The embedded data, drawn once a session in a folder of its own, which NPBML_DATA names meanwhile."""
    before = os.environ.get("NPBML_DATA")
    os.environ["NPBML_DATA"] = str(tmp_path_factory.mktemp("data"))
    try:
        return glyphs()
    finally:
        if before is None:
            del os.environ["NPBML_DATA"]
        else:
            os.environ["NPBML_DATA"] = before


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Benchmark]:
    """small(name, images, train, val, test): the benchmark with its first so many classes, each of `images`."""

    def cut(name: str, images: int | None, train: int, val: int, test: int, **more: object) -> Benchmark:
        whole = PUBLISHED[name]
        counts = {"train": train, "val": val, "test": test}
        classes = {split: dict(list(whole.classes[split].items())[: counts[split]]) for split in SPLITS}
        part = dataclasses.replace(whole, images=images, classes=classes, **more)  # type: ignore[arg-type]
        monkeypatch.setitem(PUBLISHED, name, part)
        return part

    return cut
