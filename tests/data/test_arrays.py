"""Data sets that are made in Python: any pictures, by class and split, under a name of one's own."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import npbml
from npbml.data.arrays import store_of
from npbml.data.image_data import ImageData
from npbml.data.request import Request
from npbml.data.sets import open_data
from npbml.errors import DataError, SettingError
from npbml.lab.protocols import preset
from npbml.parts import DATASETS


@pytest.fixture(autouse=True)
def built_in_sets() -> Iterator[None]:
    """No data sets but those that are built in, after each test."""
    yield
    for name in [name for name in DATASETS if not DATASETS.part(name).built_in]:
        del DATASETS.parts[name]


def pictures(seed: int, count: int = 3, size: int = 8) -> np.ndarray:
    """Coloured pictures, uint8 [count, size, size, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


def some_splits() -> dict[str, dict[str, Any]]:
    return {
        "train": {"a": pictures(0), "b": pictures(1)},
        "val": {"c": [Image.fromarray(picture) for picture in pictures(2)], "d": pictures(3) / 255},
        "test": {"e": torch.from_numpy(pictures(4)), "f": list(pictures(5))},
    }


def test_pictures_of_any_kind_make_a_store_in_memory() -> None:
    store = store_of("mine", some_splits())
    assert (store.name, store.channels, store.size) == ("mine", 3, 8)
    assert [(entry.name, entry.split, entry.start, entry.count) for entry in store.entries] == [
        ("a", "train", 0, 3),
        ("b", "train", 3, 3),
        ("c", "val", 6, 3),
        ("d", "val", 9, 3),
        ("e", "test", 12, 3),
        ("f", "test", 15, 3),
    ]
    expected = np.concatenate([pictures(seed) for seed in range(6)]).transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(store.images, expected)
    train = expected[:6] / 255
    np.testing.assert_allclose(store.mean, train.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(store.std, train.std((0, 2, 3)), rtol=1e-12)
    other = some_splits()
    other["test"]["f"][0] = other["test"]["f"][0] ^ 1
    assert store_of("mine", some_splits()).checksum == store.checksum != store_of("mine", other).checksum


def test_a_registered_set_is_opened_by_its_name() -> None:
    @npbml.register_dataset("mine", mirrors=False)
    def mine() -> dict[str, dict[str, Any]]:
        """Noise of six kinds.

        And more of it.
        """
        return some_splits()

    assert "mine" in DATASETS and DATASETS.part("mine").summary == "Noise of six kinds."
    data = open_data(Request("mine", 2, 1, 2, size=6))
    assert isinstance(data, ImageData) and data.spec.size == 6
    assert mine()["train"].keys() == {"a", "b"}, "the function stays what it is"
    assert preset("best", "mine").pretrain.augment.flip is False


@pytest.mark.parametrize("missing", ["train", "val", "test"])
def test_a_split_without_classes_is_refused_by_name(missing: str) -> None:
    for empty in ({}, None):
        splits: dict[str, Any] = some_splits() | {missing: empty}
        with pytest.raises(DataError, match=f"data set mine has no classes in {missing}"):
            store_of("mine", splits)


def test_a_class_without_pictures_is_refused_by_name() -> None:
    splits = some_splits()
    splits["val"]["c"] = []
    with pytest.raises(DataError, match=r"The class 'c' of mine: There are no images"):
        store_of("mine", splits)


def test_a_built_in_name_is_refused() -> None:
    with pytest.raises(SettingError, match="'glyphs' cannot be the name of a new data set: it is taken"):
        npbml.register_dataset("glyphs")(some_splits)
