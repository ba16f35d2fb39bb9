"""leave_one_out: each picture is predicted by a classifier that has not seen it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import npbml
from npbml import DataError, FewShotClassifier
from npbml.learner.learner import Learner

Pictures = Callable[..., np.ndarray]
Colours = Callable[..., tuple[np.ndarray, list[str]]]
LABELS = ["cat", "cat", "dog", "dog", "dog", "eel"]


@pytest.mark.parametrize("pool", [0, 5])
def test_each_answer_is_that_of_a_classifier_fitted_without_the_picture(
    learner: Learner, pictures: Pictures, pool: int
) -> None:
    x, unlabelled = pictures(6), pictures(5, seed=1)[:pool]
    found = FewShotClassifier(learner).fit(x, LABELS, unlabelled).leave_one_out()
    assert [picture.number for picture in found.pictures] == [0, 1, 2, 3, 4]
    assert found.not_covered == ("eel",)
    for picture in found.pictures:
        others = [number for number in range(6) if number != picture.number]
        fewer = FewShotClassifier(learner).fit(x[others], [LABELS[number] for number in others], unlabelled)
        probabilities = fewer.predict_proba(x[[picture.number]])[0]
        assert picture.label == LABELS[picture.number]
        assert picture.predicted == fewer.classes_[probabilities.argmax()]
        assert picture.confidence == pytest.approx(probabilities.max(), abs=1e-5)
        place = fewer.classes_.tolist().index(picture.label)
        assert picture.probability == pytest.approx(probabilities[place], abs=1e-5)
    right = [picture.predicted == picture.label for picture in found.pictures]
    assert found.accuracy == pytest.approx(np.mean(right))


def test_copies_of_a_picture_are_left_out_with_it(learner: Learner, pictures: Pictures) -> None:
    """Neither among the labelled pictures nor among the unlabelled ones does the left-out picture stay."""
    x = pictures(6)
    with_copy = FewShotClassifier(learner).fit(x[[0, 0, 1, 2, 3, 4]], ["cat", *LABELS[:5]], unlabelled=x)
    found = {picture.number: picture for picture in with_copy.leave_one_out().pictures}
    fewer = FewShotClassifier(learner).fit(x[1:5], LABELS[1:5], unlabelled=x[5:])
    for number in (0, 1):
        assert found[number].confidence == pytest.approx(fewer.predict_proba(x[:1]).max(), abs=1e-5)


def test_without_a_second_example_there_is_nothing_to_estimate(learner: Learner, pictures: Pictures) -> None:
    x = pictures(2)
    for places, labels in (([0, 1], ["cat", "dog"]), ([0, 0, 1], ["cat", "cat", "dog"])):
        with pytest.raises(DataError, match="a class with two different examples"):
            FewShotClassifier(learner).fit(x[places], labels).leave_one_out()


def test_a_wrong_label_is_named(colours: Colours, tmp_path: Path) -> None:
    """By the file's name, with what it looks like; nothing else is named."""
    x, labels = colours(5)
    files = [tmp_path / f"{number}.png" for number in range(len(x))]
    for file, picture in zip(files, x, strict=True):
        Image.fromarray(picture).save(file)
    learner = npbml.load("cifar-fs-conv4", device="cpu")
    good = FewShotClassifier(learner).fit(files, labels).leave_one_out()
    assert good.accuracy == 1 and not good.mislabelled and good.not_covered == ()
    labels[3] = "blue"
    found = FewShotClassifier(learner).fit(files, labels).leave_one_out()
    assert [(wrong.name, wrong.label, wrong.predicted) for wrong in found.mislabelled] == [
        (str(files[3]), "blue", "red")
    ]
    assert found.accuracy == pytest.approx(14 / 15)
    assert f"{files[3]} is labelled 'blue' and looks like 'red'" in str(found)


def test_a_learner_that_predicts_together_can_be_estimated(
    make_learner: Callable[..., Learner], pictures: Pictures
) -> None:
    """The full rule, with a slot for each of 3 classes."""
    learner = make_learner(channels=3, scorer={"widths": [2, 3]}).float()
    found = FewShotClassifier(learner).fit(pictures(6), LABELS).leave_one_out()
    assert len(found.pictures) == 5 and all(0 <= picture.confidence <= 1 for picture in found.pictures)
