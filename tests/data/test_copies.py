import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from npbml.data import copies
from npbml.data.copies import find_copies
from npbml.data.store import ClassEntry, Store


def smooth(count: int, size: int = 32, channels: int = 3) -> np.ndarray:
    """Pictures with large shapes, as a camera gives, [count, channels, size, size]."""
    random = np.random.default_rng(0)
    coarse = random.integers(0, 256, (count, 6, 6, 3), dtype=np.uint8)
    fine = [np.asarray(Image.fromarray(one).resize((size, size), Image.Resampling.BICUBIC)) for one in coarse]
    return np.stack(fine).transpose(0, 3, 1, 2)[:, :channels]


def write(folder: Path, images: np.ndarray) -> Store:
    half = len(images) // 2
    classes = [ClassEntry("a", "train", 0, half), ClassEntry("b", "test", half, len(images) - half)]
    return Store.write(folder, name="some", images=images, classes=classes, provenance={})


def recompressed(image: np.ndarray, quality: int) -> np.ndarray:
    file = io.BytesIO()
    Image.fromarray(image.transpose(1, 2, 0)).save(file, "JPEG", quality=quality, subsampling=0)
    return np.asarray(Image.open(file)).transpose(2, 0, 1)


@pytest.mark.parametrize("quality", [95, 80])
def test_another_compression_is_nearly_the_same(tmp_path: Path, quality: int) -> None:
    images = smooth(40).copy()
    images[30], images[5], images[7] = (
        recompressed(images[0], quality),
        recompressed(images[1], quality),
        images[2],
    )
    found = find_copies(write(tmp_path / "a", images))
    assert [(str(copy), copy.exact) for copy in found] == [
        ("a (train) = a (train)", True),
        ("a (train) ~ b (test)", False),
        ("a (train) ~ a (train)", False),
    ]


def test_many_copies_of_one_are_one_copy(tmp_path: Path) -> None:
    images = smooth(20).copy()
    images[[3, 12, 15]] = images[0]
    (copy,) = find_copies(write(tmp_path / "a", images))
    assert str(copy) == "a (train) = a (train) = b (test) = b (test)"
    assert copy.across_splits


@pytest.mark.parametrize("size", [1, 2, 3, 5, 28])
@pytest.mark.parametrize("channels", [1, 3])
def test_different_images_of_every_shape_are_no_copies(tmp_path: Path, size: int, channels: int) -> None:
    images = np.arange(10, dtype=np.uint8)[:, None, None, None] * 20 + smooth(10, size, channels) // 64
    assert not find_copies(write(tmp_path / "a", images))


def test_blank_images_that_differ_are_no_copies(tmp_path: Path) -> None:
    images = np.stack([np.full((3, 8, 8), value, np.uint8) for value in (200, 201, 202, 203)])
    assert not find_copies(write(tmp_path / "a", images))


@given(st.integers(0, 10**6), st.floats(0, 0.99))
def test_no_pair_that_is_near_is_passed_over(seed: int, apart: float) -> None:
    """Cells only save work: what they find is what comparing all with all finds."""
    random = np.random.default_rng(seed)
    thumbnails = random.uniform(0, 12, (30, 1, 4, 4)).astype(np.float32)
    thumbnails[1] = thumbnails[0] + np.float32(apart)
    features, flat = copies._features(thumbnails), thumbnails.reshape(30, -1)
    expected = {
        (a, b)
        for a in range(30)
        for b in range(a + 1, 30)
        if np.abs(features[a] - features[b]).max() <= 1 and np.abs(flat[a] - flat[b]).max() <= 6
    }
    assert (0, 1) in expected
    assert set(copies._alike(thumbnails)) == expected
