"""FewShotClassifier: pictures of any kind in, labels of any kind out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import npbml
from npbml.catalogue import LEARNERS
from npbml.classifier import FewShotClassifier
from npbml.errors import DataError, SettingError
from npbml.learner.learner import Learner
from npbml.methods import find_recipe
from npbml.tasks import Task

MakeLearner = Callable[..., Learner]
LABELS = ["cat", "cat", "dog", "dog", "eel", "eel"]


def rgb(count: int = 6, size: int = 20, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


@pytest.fixture
def colour(make_learner: MakeLearner) -> Learner:
    """The full rule, on three channels of single-precision pictures."""
    return make_learner(channels=3, scorer={"widths": [2, 3]}).float()


@pytest.fixture
def plain(make_learner: MakeLearner, ce_only: dict[str, Any]) -> Learner:
    """Cross-entropy and a unicorn head: any number of classes."""
    return make_learner(channels=3, loss=ce_only).float()


def forms(pictures: np.ndarray) -> dict[str, Any]:
    """The same RGB pictures in every form that is taken."""
    return {
        "bytes": pictures,
        "channels first": pictures.transpose(0, 3, 1, 2),
        "floats": pictures.astype(np.float64) / 255,
        "float32": (pictures / 255).astype(np.float32),
        "integers": pictures.astype(np.int64),
        "PIL": [Image.fromarray(picture) for picture in pictures],
        "a list of arrays": list(pictures),
        "a tensor": torch.from_numpy(pictures).permute(0, 3, 1, 2) / 255,
        "opaque": np.concatenate([pictures, np.full_like(pictures[..., :1], 255)], 3),
        "a mixture": [Image.fromarray(pictures[0]), *pictures[1:]],
    }


@pytest.mark.parametrize("form", list(forms(rgb(1))))
def test_a_picture_is_the_same_in_every_form(plain: Learner, form: str) -> None:
    expected = FewShotClassifier(plain).fit(rgb(), LABELS).predict_proba(rgb(seed=1))
    found = FewShotClassifier(plain).fit(forms(rgb())[form], LABELS).predict_proba(forms(rgb(seed=1))[form])
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("channels", [1, 3])
def test_grey_pictures_are_taken_by_either_learner(
    make_learner: MakeLearner, ce_only: dict[str, Any], channels: int
) -> None:
    learner, grey = make_learner(channels=channels, loss=ce_only).float(), rgb()[..., 0]
    expected = FewShotClassifier(learner).fit(grey, LABELS).predict_proba(grey)
    same: list[Any] = [grey[..., None], grey[:, None], grey / 255, [Image.fromarray(g) for g in grey]]
    for form in same:
        found = FewShotClassifier(learner).fit(form, LABELS).predict_proba(form)
        np.testing.assert_array_equal(found, expected)
    bits = grey > 127
    np.testing.assert_array_equal(
        FewShotClassifier(learner).fit(bits, LABELS).predict_proba(bits),
        FewShotClassifier(learner).fit(255 * bits.astype(np.uint8), LABELS).predict_proba(bits),
    )


def test_pictures_may_be_files(plain: Learner, tmp_path: Path) -> None:
    """As `npbml classify` reads them; tests/test_pictures.py has every other form."""
    files = [tmp_path / f"{number}.png" for number in range(6)]
    for file, picture in zip(files, rgb(), strict=True):
        Image.fromarray(picture).save(file)
    expected = FewShotClassifier(plain).fit(rgb(), LABELS).predict_proba(rgb())
    for form in (files, [str(file) for file in files], np.array([str(file) for file in files])):
        np.testing.assert_array_equal(FewShotClassifier(plain).fit(form, LABELS).predict_proba(form), expected)


def test_colour_pictures_become_grey_for_a_grey_learner(
    make_learner: MakeLearner, ce_only: dict[str, Any]
) -> None:
    learner = make_learner(channels=1, loss=ce_only).float()
    grey = [Image.fromarray(picture).convert("L") for picture in rgb()]
    expected = FewShotClassifier(learner).fit(grey, LABELS).predict_proba(grey)
    found = FewShotClassifier(learner).fit(rgb(), LABELS).predict_proba(rgb())
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("floats", [False, True])
def test_pictures_mean_the_same_to_the_learner(plain: Learner, floats: bool) -> None:
    """A prediction is learner.predict on the bytes, or on x / 255, support sorted by class."""
    support, query = rgb(size=32), rgb(7, size=32, seed=1)
    order = [4, 0, 2, 1, 3, 5]
    classifier = FewShotClassifier(plain).fit(support[order], [LABELS[place] for place in order])

    def images(pictures: np.ndarray) -> torch.Tensor:
        content = torch.from_numpy(pictures).permute(0, 3, 1, 2)
        return content / 255 if floats else content

    labels, unknown = torch.tensor([0, 0, 1, 1, 2, 2]), torch.zeros(7, dtype=torch.long)
    task = Task(images(support[[0, 1, 2, 3, 4, 5]]), labels, images(query), unknown)
    expected = plain.predict(task).softmax(-1).detach().numpy()
    np.testing.assert_allclose(classifier.predict_proba(query), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (["dog", "dog", "cat", "cat", "eel", "eel"], ["cat", "dog", "eel"]),
        ([10, 10, 2, 2, 7, 7], [2, 7, 10]),
        (np.array([10, 10, 2, 2, 7, 7]), [2, 7, 10]),
        (np.array(["b", "a", "b", "a", "c", "c"]), ["a", "b", "c"]),
        ([True, True, False, False, True, False], [False, True]),
        ([0.5, 0.5, -1.0, -1.0, 3.0, 3.0], [-1.0, 0.5, 3.0]),
        (["one", "one", 1, 1, 2.5, 2.5], ["one", 1, 2.5]),
        ([np.int64(4), np.int64(4), np.int64(3), np.int64(3), np.int64(4), np.int64(3)], [3, 4]),
        ([1, 3, 2, "a", 1, 3], [1, 3, 2, "a"]),
    ],
)
def test_labels_of_any_kind_are_sorted_where_they_can_be(plain: Learner, labels: Any, classes: list[Any]) -> None:
    classifier = FewShotClassifier(plain).fit(rgb(), labels)
    assert classifier.classes_.tolist() == classes
    predicted = classifier.predict(rgb(8, seed=1))
    assert predicted.shape == (8,) and set(predicted.tolist()) <= set(classes)
    best = classifier.predict_proba(rgb(8, seed=1)).argmax(1)
    assert predicted.tolist() == [classes[place] for place in best]


def test_labels_may_be_tuples(plain: Learner) -> None:
    pairs = [("a", 1), ("a", 1), ("b", 1), ("b", 1), ("b", 2), ("b", 2)]
    predicted = FewShotClassifier(plain).fit(rgb(), pairs).predict(rgb(8, seed=1))
    assert predicted.shape == (8,) and set(predicted.tolist()) <= set(pairs)


def test_labels_may_be_a_tensor_or_tensors(plain: Learner) -> None:
    labels: Any = torch.tensor([7, 7, 3, 3, 5, 5])
    for form in (labels, list(labels)):
        classifier = FewShotClassifier(plain).fit(rgb(), form)
        assert classifier.classes_.tolist() == [3, 5, 7]
        predicted = classifier.predict(rgb(seed=1))
        assert classifier.score(rgb(seed=1), torch.from_numpy(predicted)) == 1.0


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["a", "a", "b", "b", None, None], "Label 4 is None: every image needs a label"),
        (["a", "a", "b", "b", "c", float("nan")], "Label 5 is nan: every image needs a label"),
        (np.array([1, np.nan, 2, 2, 3, 3]), "Label 1 is nan"),
        (np.array(["NaT"] * 6, dtype="datetime64[D]"), "Label 0 is None"),
        ([np.datetime64("NaT")] * 6, "Label 0 is NaT"),
        ([["a"], ["a"], ["b"], ["b"], ["c"], ["c"]], "Label 0 is of type list, which cannot name a class"),
        (["a", "a", "b", "b", {}, {}], "Label 4 is of type dict"),
        (list(np.eye(6)), "Label 0 is of type ndarray"),
        (list(torch.eye(6)), "Label 0 is a tensor with 1 dimensions"),
        (np.eye(6, dtype=int), "The labels have 2 dimensions: give a list of one label for each image"),
        (torch.zeros(6, 1), "The labels have 2 dimensions"),
        (torch.tensor(1), "The labels have 0 dimensions"),
        ("aabbcc", "The labels are of type str: give a list"),
        ({"a": 1}, "The labels are of type dict"),
        (None, "The labels are of type NoneType"),
        (3, "The labels are of type int"),
        (["a"] * 6, "Every label is 'a', which is one class: give images of at least 2 classes"),
    ],
)
def test_labels_that_cannot_be_used_are_refused(plain: Learner, labels: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        FewShotClassifier(plain).fit(rgb(), labels)
    if "Every label" not in message:
        with pytest.raises(DataError, match=message):
            FewShotClassifier(plain).fit(rgb(), LABELS).score(rgb(), labels)


def test_classes_may_have_unequal_counts(colour: Learner) -> None:
    labels = ["cat", "dog", "dog", "dog", "eel", "eel"]
    probabilities = FewShotClassifier(colour).fit(rgb(), labels).predict_proba(rgb(8, seed=1))
    assert probabilities.shape == (8, 3) and np.isfinite(probabilities).all()


@pytest.mark.parametrize("final_batch", ["auto", "query", "joint"])
def test_probabilities_are_positive_and_sum_to_1(colour: Learner, final_batch: Any) -> None:
    classifier = FewShotClassifier(colour, final_batch).fit(rgb(), LABELS)
    probabilities = classifier.predict_proba(rgb(8, seed=1))
    assert probabilities.shape == (8, 3) and probabilities.min() >= 0
    np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-6)


def test_a_single_picture_is_normalised_with_the_labelled_ones(colour: Learner) -> None:
    one = rgb(1, seed=1)
    auto = FewShotClassifier(colour).fit(rgb(), LABELS).predict_proba(one)
    joint = FewShotClassifier(colour, "joint").fit(rgb(), LABELS).predict_proba(one)
    assert auto.shape == (1, 3)
    np.testing.assert_array_equal(auto, joint)


def test_large_batches_are_predicted_as_the_learner_was_trained(colour: Learner) -> None:
    many = rgb(6, seed=1)
    auto, query, joint = (
        FewShotClassifier(colour, final).fit(rgb(), LABELS).predict_proba(many)
        for final in ("auto", "query", "joint")
    )
    np.testing.assert_array_equal(auto, query)
    assert np.abs(auto - joint).max() > 1e-4


def test_batch_size_bounds_what_is_predicted_together(colour: Learner) -> None:
    many = rgb(10, seed=1)
    classifier = FewShotClassifier(colour, "joint", batch_size=4).fit(rgb(), LABELS)
    parts = [classifier.predict_proba(many[places]) for places in (slice(4), slice(4, 7), slice(7, 10))]
    np.testing.assert_allclose(classifier.predict_proba(many), np.concatenate(parts), atol=1e-6)
    with pytest.raises(SettingError, match="batch_size is 0; it must be a whole number of at least 1"):
        classifier.set_params(batch_size=0).predict_proba(many)


def test_score_is_the_share_of_right_labels(plain: Learner) -> None:
    classifier = FewShotClassifier(plain).fit(rgb(), LABELS)
    predicted = classifier.predict(rgb(8, seed=1)).tolist()
    assert classifier.score(rgb(8, seed=1), predicted) == 1.0
    wrong = ["yak" if place < 2 else label for place, label in enumerate(predicted)]
    assert classifier.score(rgb(8, seed=1), wrong) == 0.75
    assert classifier.score(rgb(8, seed=1), np.array(wrong)) == 0.75


def test_c21_neither_the_order_nor_the_names_of_classes_matter_under_cross_entropy(plain: Learner) -> None:
    """Names that sort the other way round, pictures in another order: the same answers under other names."""
    query, order = rgb(8, seed=1), [3, 5, 0, 4, 1, 2]
    names = {"cat": "z", "dog": "m", "eel": "a"}
    usual = FewShotClassifier(plain).fit(rgb(), LABELS)
    other = FewShotClassifier(plain).fit(rgb()[order], [names[LABELS[place]] for place in order])
    assert other.classes_.tolist() == ["a", "m", "z"]
    np.testing.assert_allclose(other.predict_proba(query)[:, ::-1], usual.predict_proba(query), atol=1e-4)
    assert other.predict(query).tolist() == [names[label] for label in usual.predict(query).tolist()]


def test_fitting_again_forgets_the_first_pictures(plain: Learner) -> None:
    once = FewShotClassifier(plain).fit(rgb(), LABELS).predict_proba(rgb(8, seed=1))
    again = FewShotClassifier(plain).fit(rgb(seed=5), LABELS[::-1]).fit(rgb(), LABELS)
    np.testing.assert_array_equal(again.predict_proba(rgb(8, seed=1)), once)


@pytest.mark.parametrize("method", ["predict", "predict_proba", "score"])
def test_predicting_before_fitting_is_refused(plain: Learner, method: str) -> None:
    arguments = (rgb(), LABELS) if method == "score" else (rgb(),)
    with pytest.raises(DataError, match=r"call fit\(pictures, labels\) first"):
        getattr(FewShotClassifier(plain), method)(*arguments)


def test_lengths_that_differ_are_refused(plain: Learner) -> None:
    with pytest.raises(DataError, match="6 images but 5 labels"):
        FewShotClassifier(plain).fit(rgb(), LABELS[:5])
    with pytest.raises(DataError, match="6 images but 5 labels"):
        FewShotClassifier(plain).fit(rgb(), LABELS).score(rgb(), LABELS[:5])


def test_a_number_of_classes_that_the_rule_cannot_take_is_refused(colour: Learner) -> None:
    with pytest.raises(DataError, match=r"slot for each of 3 classes; the task has 2"):
        FewShotClassifier(colour).fit(rgb(), ["a", "a", "a", "b", "b", "b"])


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (rgb() / 254.0, "Image 0 has floats outside 0 to 1"),
        (rgb() / 255 - 0.5, "Image 0 has floats outside 0 to 1"),
        (np.full((6, 8, 8), np.nan), "Image 0 has values that are NaN or infinite"),
        (rgb().astype(np.int64) * 2, "Image 0 is of int64"),
        (np.zeros((6, 8, 8, 5), np.uint8), r"Image 0 has the shape \[8, 8, 5\]"),
        (np.zeros((6, 8), np.uint8), r"not \[6, 8\]"),
        (np.zeros((0, 8, 8), np.uint8), "There are no images"),
        ([], "There are no images"),
        (Image.new("RGB", (8, 8)), r"\[image\]"),
        (["a.png"] * 6, "There is no image file 'a.png'"),
        ("a.png", r"\[image\]"),
        (rgb()[0], "looks like one image with 3 channels"),
    ],
)
def test_pictures_that_cannot_be_used_are_refused(plain: Learner, images: Any, message: str) -> None:
    labels = LABELS if not hasattr(images, "__len__") or len(images) else []
    with pytest.raises(DataError, match=message):
        FewShotClassifier(plain).fit(images, labels)
    with pytest.raises(DataError, match=message):
        FewShotClassifier(plain).fit(rgb(), LABELS).predict(images)


def test_parameters_can_be_read_and_set_as_in_scikit_learn(plain: Learner, colour: Learner) -> None:
    classifier = FewShotClassifier(plain)
    others = {"final_batch": "auto", "threshold": None, "unknown": "unknown", "device": "auto"}
    assert classifier.get_params() == {"learner": plain, "batch_size": 200, **others}
    assert classifier.set_params(learner=colour, batch_size=3) is classifier
    assert classifier.get_params() == {"learner": colour, "batch_size": 3, **others}
    with pytest.raises(SettingError, match="no parameter 'bach'; it has"):
        classifier.set_params(bach=3)


def test_the_learner_that_comes_along_labels_pictures_at_once() -> None:
    """Five patterns in shaky colours, drawn larger than the learner's pictures, one shown of each."""
    learner = npbml.load("cifar-fs-conv4", device="cpu")
    size = (LEARNERS / "cifar-fs-conv4.safetensors").stat().st_size
    assert "cifar-fs-conv4" in npbml.shipped() and size < 3_000_000
    random = np.random.default_rng(0)
    y, x = np.mgrid[:48, :48]
    patterns = [x // 8 % 2, y // 8 % 2, (x // 8 + y // 8) % 2, (x - 24) ** 2 + (y - 24) ** 2 < 300, 0 * x]

    def pictures(count: int) -> np.ndarray:
        noise = random.normal(0, 25, (5, count, 48, 48, 3))
        shades = 60 + 130 * np.stack(patterns)[:, None, :, :, None] + noise
        return shades.clip(0, 255).astype(np.uint8).reshape(-1, 48, 48, 3)

    labels = ["upright", "level", "chequered", "round", "plain"]
    classifier = FewShotClassifier(learner).fit(pictures(1), labels)
    found = classifier.predict(pictures(8))
    assert (found == np.repeat(labels, 8)).mean() > 0.9


@pytest.fixture
def any_shape(make_learner: MakeLearner) -> Learner:
    """A learner of npbml-any, on three channels."""
    rule = dict(find_recipe("npbml-any").rule)
    return make_learner(channels=3, **{**rule, "net": {**rule["net"], "filters": 6}}).float()


@pytest.mark.parametrize("classes", [2, 3, 6])
def test_a_picture_alone_gets_the_answer_that_it_gets_among_others(any_shape: Learner, classes: int) -> None:
    labels = [f"class {number % classes}" for number in range(6)]
    classifier = FewShotClassifier(any_shape, batch_size=4).fit(rgb(), labels, unlabelled=rgb(5, seed=2))
    together = classifier.predict_proba(rgb(seed=1))
    assert together.shape == (6, classes)
    np.testing.assert_allclose(together.sum(1), 1, atol=1e-5)
    for number, picture in enumerate(rgb(seed=1)):
        np.testing.assert_allclose(classifier.predict_proba([picture]), together[number : number + 1], atol=1e-5)


def test_unlabelled_pictures_change_the_answers_and_no_others_do(any_shape: Learner) -> None:
    query = rgb(seed=1)
    without = FewShotClassifier(any_shape).fit(rgb(), LABELS)
    empty = FewShotClassifier(any_shape).fit(rgb(), LABELS, unlabelled=[])
    with_pool = FewShotClassifier(any_shape).fit(rgb(), LABELS, unlabelled=rgb(8, seed=3))
    np.testing.assert_array_equal(without.predict_proba(query), empty.predict_proba(query))
    assert np.abs(with_pool.predict_proba(query) - without.predict_proba(query)).max() > 1e-4


def test_a_learner_of_one_shape_takes_no_unlabelled_pictures(colour: Learner) -> None:
    classifier = FewShotClassifier(colour)
    with pytest.raises(DataError, match="predict many pictures in one call"):
        classifier.fit(rgb(), LABELS, unlabelled=rgb(4))
    with pytest.raises(SettingError, match="predicted together"):
        colour.answer({}, torch.zeros(1, 3, 32, 32, dtype=torch.uint8))


def test_a_fit_that_fails_leaves_the_one_before(any_shape: Learner) -> None:
    classifier = FewShotClassifier(any_shape).fit(rgb(), LABELS)
    before = classifier.predict_proba(rgb(seed=1))
    with pytest.raises(DataError):
        classifier.fit(rgb(), LABELS, unlabelled=["missing.png"])
    np.testing.assert_array_equal(classifier.predict_proba(rgb(seed=1)), before)
