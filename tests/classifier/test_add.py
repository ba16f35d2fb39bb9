"""add and remove: what a classifier knows can grow, be corrected and shrink, as if it had been fitted so."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from npbml import DataError, FewShotClassifier
from npbml.learner.learner import Learner

Pictures = Callable[..., np.ndarray]
LABELS = ["cat", "cat", "dog", "dog", "eel", "eel"]


def same(one: FewShotClassifier, other: FewShotClassifier, query: np.ndarray) -> None:
    """Both know the same, in the same order."""
    assert one.classes_.tolist() == other.classes_.tolist()
    assert one.class_count_.tolist() == other.class_count_.tolist()
    np.testing.assert_allclose(one.predict_proba(query), other.predict_proba(query), atol=1e-6)


def test_adding_is_fitting_with_all_at_once(learner: Learner, pictures: Pictures) -> None:
    x, pool, query = pictures(6), pictures(5, seed=1), pictures(4, seed=2)
    whole = FewShotClassifier(learner).fit(x, LABELS, pool)
    grown = FewShotClassifier(learner).fit(x[:4], LABELS[:4], pool[:2]).add(x[4:], LABELS[4:], pool[2:])
    same(grown, whole, query)


def test_adding_to_a_learner_that_predicts_together(
    make_learner: Callable[..., Learner], ce_only: dict[str, Any], pictures: Pictures
) -> None:
    plain, x, query = make_learner(channels=3, loss=ce_only).float(), pictures(6), pictures(9, seed=2)
    whole = FewShotClassifier(plain).fit(x, LABELS)
    same(FewShotClassifier(plain).fit(x[:4], LABELS[:4]).add(x[4:], LABELS[4:]), whole, query)
    with pytest.raises(DataError, match="no others"):
        whole.add(x[:1], ["cat"], unlabelled=query)


def test_a_picture_that_is_given_again_gets_its_new_label(learner: Learner, pictures: Pictures) -> None:
    x, query = pictures(6), pictures(4, seed=2)
    wrong = FewShotClassifier(learner).fit(x, ["dog", *LABELS[1:]])
    same(wrong.add(x[:1], ["cat"]), FewShotClassifier(learner).fit(x, LABELS), query)
    same(wrong.add(x, LABELS), FewShotClassifier(learner).fit(x, LABELS), query)


def test_a_picture_that_gets_a_label_is_unlabelled_no_more(learner: Learner, pictures: Pictures) -> None:
    x, query = pictures(6), pictures(4, seed=2)
    later = FewShotClassifier(learner).fit(x[:4], LABELS[:4], unlabelled=x).add(x[4:], LABELS[4:])
    same(later, FewShotClassifier(learner).fit(x, LABELS), query)


def test_removing_is_fitting_without(learner: Learner, pictures: Pictures) -> None:
    x, query = pictures(6), pictures(4, seed=2)
    fitted = FewShotClassifier(learner).fit(x, LABELS)
    same(fitted.remove(x[4:]), FewShotClassifier(learner).fit(x[:4], LABELS[:4]), query)
    assert fitted.classes_.tolist() == ["cat", "dog"]


def test_what_cannot_be_added_or_removed_is_refused_and_nothing_changes(
    learner: Learner, pictures: Pictures
) -> None:
    x, query = pictures(6), pictures(4, seed=2)
    fitted = FewShotClassifier(learner).fit(x, LABELS)
    before = fitted.predict_proba(query)
    with pytest.raises(DataError, match="Image 1 is there twice, with the labels 'cat' and 'dog'"):
        fitted.add(query[[0, 0]], ["cat", "dog"])
    with pytest.raises(DataError, match="1 images but 2 labels"):
        fitted.add(query[:1], ["cat", "dog"])
    with pytest.raises(DataError, match="Image 1 is not among the labelled pictures"):
        fitted.remove([x[0], query[0]])
    with pytest.raises(DataError, match="at least 2 classes must be left"):
        fitted.remove(x[2:])
    np.testing.assert_array_equal(fitted.predict_proba(query), before)


def test_a_picture_with_two_labels_is_refused_by_name(learner: Learner, pictures: Pictures) -> None:
    x = pictures(6)
    with pytest.raises(DataError, match="Image 0 and Image 3 are the same picture, with the labels 'cat' and 'd"):
        FewShotClassifier(learner).fit(x[[0, 1, 2, 0, 4, 5]], LABELS)
    FewShotClassifier(learner).fit(x[[0, 0, 2, 3, 4, 5]], LABELS)  # the same label twice is a weight of two


def test_the_unlabelled_pictures_are_read_in_parts(learner: Learner, pictures: Pictures) -> None:
    x, pool, query = pictures(6), pictures(9, seed=1), pictures(4, seed=2)
    one = FewShotClassifier(learner, batch_size=2).fit(x, LABELS, pool)
    same(one, FewShotClassifier(learner).fit(x, LABELS, iter(pool)), query)
