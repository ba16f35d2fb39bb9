"""Runs of one's own pictures: how classes are split, and tasks that fit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from npbml.errors import DataError
from npbml.lab.own_pictures import OwnPictures, fit_tasks, own_pictures, split_words
from npbml.lab.protocols import preset
from npbml.lab.schema import check_config


def counted(classes: tuple[int, int, int], images: int) -> OwnPictures:
    splits = {
        split: {f"{split} {number}": images for number in range(count)}
        for split, count in zip(("train", "val", "test"), classes, strict=True)
    }
    return OwnPictures("mine", splits, dealt=True)


FITTED: list[tuple[tuple[int, int, int], int, dict[str, Any], tuple[int, int, int], int]] = [
    ((60, 20, 20), 600, {}, (5, 15, 1), 0),
    ((6, 2, 2), 8, {}, (2, 7, 1), 2),
    ((6, 2, 2), 600, {}, (2, 15, 1), 1),
    ((12, 6, 6), 8, {}, (5, 7, 1), 1),
    ((6, 2, 2), 8, {"shots": 5}, (2, 3, 1), 2),
    ((6, 2, 2), 2, {}, (2, 1, 1), 2),
    ((6, 2, 2), 8, {"ways": 5}, (5, 7, 1), 1),
    ((6, 2, 2), 8, {"queries": 15}, (2, 15, 1), 1),
    ((6, 2, 2), 4, {"shots": 5}, (2, 15, 1), 1),  # too few for the shots: refused later, by the class's name
]


@pytest.mark.parametrize(("classes", "images", "named", "expected", "told"), FITTED)
def test_tasks_are_as_large_as_the_pictures_allow(
    classes: tuple[int, int, int],
    images: int,
    named: Mapping[str, Any],
    expected: tuple[int, int, int],
    told: int,
) -> None:
    config = preset("quick", "mine", shots=named.get("shots", 1))
    fitted, said = fit_tasks(config, {**named, "method": "npbml"}, counted(classes, images))
    assert (fitted.learner.ways, fitted.queries, fitted.pretrain.validation_shots) == expected
    assert len(said) == told and all("and not" in line for line in said)
    check_config(fitted)


def test_validation_of_pretraining_fits_too() -> None:
    fitted, said = fit_tasks(preset("published", "mine"), {}, counted((6, 2, 2), 8))
    assert (fitted.queries, fitted.pretrain.validation_shots) == (7, 1) and "1 shots and not 5" in said[-1]
    assert fitted.method == "npbml", "a protocol of the paper's has the paper's method"


def test_without_a_name_the_methods_take_any_number_of_classes() -> None:
    fitted, said = fit_tasks(preset("quick", "mine"), {}, counted((60, 20, 20), 600))
    assert (fitted.method, fitted.baselines) == ("npbml-any", ("maml-any", "prototypes")) and len(said) == 1
    for named in ({"method": "npbml"}, {"baselines": ("maml",)}):
        assert fit_tasks(preset("quick", "mine"), named, counted((60, 20, 20), 600))[0].method == "npbml"


def test_too_few_classes_are_told_with_what_to_do() -> None:
    with pytest.raises(DataError, match=r"5 classes, 1 for val.*6 in all.*npbml classify FEW MANY"):
        fit_tasks(preset("quick", "mine"), {}, counted((3, 1, 1), 600))


def draw(folder: Path, classes: int, images: int = 2) -> Path:
    for label in range(classes):
        for number in range(images):
            (folder / f"c{label:02}").mkdir(parents=True, exist_ok=True)
            Image.new("L", (16, 16), label).save(folder / f"c{label:02}" / f"{number}.png")
    return folder


@pytest.mark.parametrize(("classes", "sizes"), [(6, (2, 2, 2)), (7, (3, 2, 2)), (10, (6, 2, 2)), (20, (12, 4, 4))])
def test_a_folder_is_split_and_that_is_told(tmp_path: Path, classes: int, sizes: tuple[int, int, int]) -> None:
    found = own_pictures(str(draw(tmp_path / "mine", classes)))
    assert found is not None and found.dealt
    assert tuple(len(found.splits[split]) for split in ("train", "val", "test")) == sizes
    text = "\n".join(split_words(found))
    assert f"{classes} classes, split at random" in text and "train/, val/ and test/" in text
    assert "npbml data prepare NAME" in text
    assert all(name in text for split in found.splits.values() for name in list(split)[:6])


def test_a_folder_that_is_split_already_is_not_said_to_be_split_at_random(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        draw(tmp_path / "mine" / split, 2).rename(tmp_path / "mine" / f"{split}-")
        for folder in (tmp_path / "mine" / f"{split}-").iterdir():
            folder.rename(folder.with_name(f"{split} {folder.name}"))
        (tmp_path / "mine" / f"{split}-").rename(tmp_path / "mine" / split)
    found = own_pictures(str(tmp_path / "mine"))
    assert found is not None and not found.dealt and "random" not in "\n".join(split_words(found))


@pytest.mark.parametrize("name", ["glyphs", "cifar-fs", "not/there"])
def test_other_data_sets_are_left_alone(name: str) -> None:
    assert own_pictures(name) is None
