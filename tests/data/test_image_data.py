"""The images of a run: in its size, split by split, with enough of them for its tasks."""

from pathlib import Path

import numpy as np
import pytest
import torch

from npbml.data.image_data import ImageData, shown_to
from npbml.data.request import Request
from npbml.data.sets import open_data
from npbml.data.sinusoid import Sinusoids
from npbml.data.store import ClassEntry, Store
from npbml.errors import DataError
from npbml.learner.settings import ImageSpec
from npbml.parts import DATASETS


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Three classes of four random pictures in each split."""
    images = np.random.default_rng(0).integers(0, 256, (36, 3, 8, 8), dtype=np.uint8)
    splits = ["train"] * 3 + ["val"] * 3 + ["test"] * 3
    entries = [ClassEntry(f"class {n}", split, 4 * n, 4) for n, split in enumerate(splits)]  # type: ignore[arg-type]
    return Store.write(tmp_path / "some", name="some", images=images, classes=entries, provenance={})


def test_splits_are_those_of_the_store(store: Store) -> None:
    data = ImageData(store, Request("some", 3, 1, 3))
    splits = data.splits(torch.device("cpu"))
    assert list(splits) == ["train", "val", "test"] and data.checksum == store.checksum
    for name, classes in splits.items():
        assert torch.equal(classes.images, store.classes(name).images)  # type: ignore[arg-type]
    assert data.spec == splits["train"].spec
    assert (data.spec.channels, data.spec.size) == (3, 8)
    assert data.spec.mean == pytest.approx(store.mean) and data.spec.std == pytest.approx(store.std)


def test_another_size_is_that_of_every_split(store: Store) -> None:
    data = ImageData(store, Request("some", 2, 1, 1, size=12))
    assert data.spec.size == 12
    for classes in data.splits(torch.device("cpu")).values():
        assert classes.images.shape == (12, 3, 12, 12)


@pytest.mark.parametrize(
    ("request_", "words"),
    [(Request("some", 4, 1, 1), "4 ways.*only 3 classes"), (Request("some", 2, 2, 3), "has 4 images.*needs 5")],
)
def test_tasks_that_the_images_cannot_fill_are_refused(store: Store, request_: Request, words: str) -> None:
    with pytest.raises(DataError, match=words):
        ImageData(store, request_).classes("test")


def test_classes_are_shown_as_a_learner_takes_them(store: Store) -> None:
    spec = ImageSpec(1, 6, (0.25,), (0.5,))
    shown = shown_to(store.classes("test"), spec)
    assert shown.images.shape == (12, 1, 6, 6) and shown.spec == spec
    levels = shown.images[:2].float() / 255
    torch.testing.assert_close(shown.batch(torch.arange(2)), (levels - 0.25) / 0.5)


def test_a_run_opens_its_data_by_name_or_by_folder(store: Store) -> None:
    opened = open_data(Request(str(store.folder), 3, 1, 3))
    assert isinstance(opened, ImageData) and opened.checksum == store.checksum
    waves = open_data(Request("sinusoid", 5, 10, 7))
    assert waves == Sinusoids(10, 7) and waves.checksum == "" and waves.spec == ImageSpec(1, 1, (0.0,), (1.0,))
    assert set(DATASETS) >= {"glyphs", "mini-imagenet", "sinusoid"}
