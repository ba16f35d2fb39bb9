import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from npbml.data.benchmarks import PUBLISHED, Benchmark
from npbml.data.prepare import prepare
from npbml.errors import DataError


@pytest.fixture
def benchmark(small: Callable[..., Benchmark]) -> Benchmark:
    return small("omniglot", 2, 3, 2, 2)


def drawings(benchmark: Benchmark) -> dict[str, np.ndarray]:
    """Bits, dark on light, [drawings, 105, 105] by class."""
    random = np.random.default_rng(0)
    return {name: random.random((2, 105, 105)) > 0.2 for name in benchmark.split_of()}


def write_folders(folder: Path, bits: dict[str, np.ndarray]) -> Path:
    for number, (name, drawn) in enumerate(bits.items()):
        part = ("images_background", "images_evaluation")[number % 2]
        (folder / part / name).mkdir(parents=True)
        for place, drawing in enumerate(drawn):
            Image.fromarray(drawing).save(folder / part / name / f"{number:04}_{place:02}.png")
    (folder / "images_background_small1" / next(iter(bits))).mkdir(parents=True)
    Image.fromarray(drawn[0]).save(folder / "images_background_small1" / next(iter(bits)) / "0000_00.png")
    return folder


def write_zips(folder: Path, bits: dict[str, np.ndarray]) -> Path:
    loose = write_folders(folder.parent / "loose", bits)
    folder.mkdir(parents=True)
    for part in ("images_background", "images_evaluation"):
        with zipfile.ZipFile(folder / f"{part}.zip", "w") as packed:
            for file in sorted((loose / part).rglob("*.png")):
                packed.write(file, str(file.relative_to(loose)))
    return folder


@pytest.mark.parametrize("write", [write_folders, write_zips])
def test_characters_in_four_positions(write: Callable[..., Path], tmp_path: Path, benchmark: Benchmark) -> None:
    bits = drawings(benchmark)
    store = prepare("omniglot", write(tmp_path / "in", bits), tmp_path / "stores")
    assert store.images.shape == (7 * 4 * 2, 1, 28, 28)
    at = {entry.name: entry for entry in store.entries}
    for name, split in benchmark.split_of().items():
        for place in range(2):
            upright = Image.fromarray(bits[name][place]).convert("L").resize((28, 28), Image.Resampling.LANCZOS)
            for turn in range(4):
                entry = at[f"{name}/rot{90 * turn:03}"]
                assert (entry.split, entry.superclass, entry.count) == (split, name.split("/")[0], 2)
                expected = np.asarray(upright.rotate(90 * turn))
                np.testing.assert_array_equal(store.images[entry.start + place, 0], expected)
    assert store.mean[0] > 0.6  # light paper


def test_another_size(tmp_path: Path, benchmark: Benchmark) -> None:
    bits = drawings(benchmark)
    store = prepare("omniglot", write_zips(tmp_path / "in", bits), tmp_path / "stores", size=105)
    np.testing.assert_array_equal(store.images[0, 0], bits[next(iter(bits))][0] * 255)


def test_errors(tmp_path: Path, benchmark: Benchmark) -> None:
    bits = drawings(benchmark)
    source = write_zips(tmp_path / "in", bits)
    name = next(iter(bits))
    (source / "images_evaluation.zip").rename(tmp_path / "elsewhere.zip")
    with pytest.raises(DataError, match=r"in lacks .* of the 7 classes of omniglot.*It holds"):
        prepare("omniglot", source, tmp_path / "stores")
    loose = tmp_path / "loose"
    (loose / "images_background" / name / "0000_01.png").unlink()
    with pytest.raises(DataError, match=f"holds 1 images of class '{name}', and omniglot has 2"):
        prepare("omniglot", loose, tmp_path / "stores")
    (loose / "images_background" / name / "0000_01.png").write_bytes(b"\x89PNG")
    with pytest.raises(DataError, match=r"0000_01\.png cannot be read as an image"):
        prepare("omniglot", loose, tmp_path / "stores")
    assert not list((tmp_path / "stores").glob("*"))


def test_names_have_no_position_in_the_published_list() -> None:
    assert not any("/rot" in name for name in PUBLISHED["omniglot"].split_of())
