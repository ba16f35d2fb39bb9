from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from npbml.data import glyphs as glyphs_module
from npbml.data.characters import LOOK_ALIKE, SCRIPTS, characters
from npbml.data.glyphs import FACES, IMAGES_PER_CLASS, draw, glyphs, renderings, resemblance, versions
from npbml.data.store import SPLITS, Store
from npbml.errors import DataError
from npbml.randomness import generator

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
CHECKSUM = "cdfecb501fd1d4d1fc67a50bc782fd4cc59d9b3a1a32dcf5b801aeafa23f687c"


def test_a_thousand_classes_of_many_scripts(glyph_store: Store) -> None:
    assert len(glyph_store.entries) >= 1000
    assert (glyph_store.channels, glyph_store.size) == (1, 28)
    assert all(entry.count == IMAGES_PER_CLASS for entry in glyph_store.entries)
    assert IMAGES_PER_CLASS >= 5 + 15
    for split in SPLITS:
        assert len(glyph_store.classes(split)) >= 100
    assert len({entry.superclass for entry in glyph_store.entries}) >= 15


def test_no_script_and_no_character_is_in_two_splits(glyph_store: Store) -> None:
    scripts = {
        split: {entry.superclass for entry in glyph_store.entries if entry.split == split} for split in SPLITS
    }
    assert scripts == {split: set(SCRIPTS[split]) for split in SPLITS}
    assert len(scripts["test"]) >= 5
    assert sum(map(len, scripts.values())) == len(set().union(*scripts.values()))
    codes = [code for _, _, code in characters()]
    assert len(set(codes)) == len(codes)


def test_no_two_characters_look_the_same_in_any_two_faces() -> None:
    every = [renderings(code) for _, _, code in characters()]
    owner = np.repeat(np.arange(len(every)), [len(faces) for faces in every])
    images = np.concatenate(every)
    assert (images.reshape(len(images), -1).sum(1) > 255 * 20).all()
    for first in range(0, len(images), 1000):
        alike = resemblance(images[first : first + 1000], images)
        alike[owner[first : first + 1000, None] == owner] = 0
        assert alike.max() < LOOK_ALIKE


def test_resemblance_tells_look_alikes() -> None:
    def closest(one: str, other: str) -> float:
        return float(resemblance(renderings(ord(one)), renderings(ord(other))).max())

    for one, other in ("AΑ", "oO", "cс", "sS", "HН"):
        assert closest(one, other) > LOOK_ALIKE
    for one, other in ("AB", "KX", "жш"):
        assert closest(one, other) < LOOK_ALIKE


def test_no_face_draws_a_box_in_place_of_a_character() -> None:
    missing = {face: glyphs_module._render(face, 0x10FFFF) for face in FACES}
    for _, _, code in characters():
        for face in FACES:
            if code in glyphs_module._charmap(face):
                assert not np.array_equal(glyphs_module._render(face, code), missing[face]), (face, hex(code))


def test_the_same_bytes_every_time(glyph_store: Store, tmp_path: Path) -> None:
    again = glyphs(tmp_path)
    assert again.folder != glyph_store.folder
    assert again.checksum == glyph_store.checksum
    assert (again.mean, again.std, again.entries) == (glyph_store.mean, glyph_store.std, glyph_store.entries)
    glyph_store.verify()


def test_the_same_bytes_on_every_machine_with_the_pins(glyph_store: Store) -> None:
    pins = dict(line.split("==") for line in CONSTRAINTS.read_text().split() if "==" in line)
    for name in ("pillow", "matplotlib"):
        if versions()[name] != pins[name]:
            pytest.skip(f"the checksum is that of {name} {pins[name]}, and {versions()[name]} is installed")
    assert glyph_store.checksum == CHECKSUM


def test_pictures_depend_on_character_and_seed_alone(glyph_store: Store) -> None:
    place, (_, _, code) = 500, characters()[500]
    stored = glyph_store.images[place * IMAGES_PER_CLASS : (place + 1) * IMAGES_PER_CLASS, 0]
    np.testing.assert_array_equal(draw(code, seed=0), stored)
    assert not np.array_equal(draw(code, seed=1), stored)


def test_every_picture_shows_dark_ink_on_light_paper_and_differs(glyph_store: Store) -> None:
    images = glyph_store.images[:, 0].astype(np.int32)
    flat = images.reshape(len(images), -1)
    assert len(np.unique(flat, axis=0)) == len(flat)
    border = np.concatenate([images[:, 0], images[:, -1], images[:, :, 0], images[:, :, -1]], 1)
    paper = np.median(border, 1)
    assert (paper > 170).all()
    darkest = np.sort(flat, 1)[:, :12].mean(1)
    assert (paper - darkest > 50).mean() > 0.995


def test_raw_pixels_are_not_enough(glyph_store: Store) -> None:
    classes = glyph_store.classes("test")
    task = classes.sample(600, 5, 1, 15, generator(0, "raw pixels"), classes.batch)
    distance = torch.cdist(task.query_images.flatten(2), task.support_images.flatten(2))
    accuracy = (distance.argmin(-1) == task.query_labels).float().mean(1)
    mean, interval = float(accuracy.mean()), 1.96 * float(accuracy.std()) / 600**0.5
    assert mean - interval > 0.2 and mean + interval < 0.6


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Only three characters, for what does not depend on how many; gives the code points drawn so far."""
    drawn: list[int] = []

    def noted(code: int, seed: int) -> np.ndarray:
        drawn.append(code)
        return draw(code, seed)

    chosen = [("train", "latin", 0x41), ("val", "georgian", 0x10D0), ("test", "hebrew", 0x5D0)]
    monkeypatch.setattr(glyphs_module, "characters", lambda: chosen)
    monkeypatch.setattr(glyphs_module, "draw", noted)
    yield drawn


def test_a_cached_store_is_opened_and_progress_is_told(few: list[int], tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    glyphs(tmp_path, progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]
    glyphs(tmp_path)
    assert len(few) == 3
    assert glyphs(tmp_path, seed=1).checksum != glyphs(tmp_path).checksum
    assert len(few) == 6


@pytest.mark.parametrize("what", ["versions", "REVISION"])
def test_a_store_of_other_versions_is_made_anew(
    few: list[int], tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    glyphs(tmp_path)
    other = 99 if what == "REVISION" else lambda: versions() | {"pillow": "0"}
    monkeypatch.setattr(glyphs_module, what, other)
    glyphs(tmp_path)
    glyphs(tmp_path)
    assert len(few) == 6


def test_a_damaged_store_is_made_anew(few: list[int], tmp_path: Path) -> None:
    store = glyphs(tmp_path)
    (store.folder / "images.npy").write_bytes(b"")
    glyphs(tmp_path).verify()
    assert len(few) == 6


def test_two_that_make_it_at_once_both_get_it(few: list[int], tmp_path: Path) -> None:
    for attempt in map(str, range(5)):
        with ThreadPoolExecutor(4) as pool:
            stores = list(pool.map(glyphs, [tmp_path / attempt] * 4))
        for store in stores:
            store.verify()
        assert [path.name for path in (tmp_path / attempt).iterdir()] == ["glyphs"]


def test_a_character_that_no_font_has_is_named() -> None:
    with pytest.raises(DataError, match=r"U\+4E00"):
        renderings(0x4E00)
