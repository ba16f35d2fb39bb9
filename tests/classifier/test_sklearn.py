"""scikit-learn's contract: the classifier is an estimator like its own, and works where it is not installed."""

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn
from PIL import Image
from sklearn.base import BaseEstimator, ClassifierMixin, clone, is_classifier
from sklearn.calibration import CalibratedClassifierCV
from sklearn.exceptions import NotFittedError, SkipTestWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_predict, cross_val_score
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator
from sklearn.utils.validation import check_is_fitted, validate_data

import npbml
from npbml import DataError, FewShotClassifier
from npbml.learner.learner import Learner

Pictures = Callable[..., np.ndarray]
Colours = Callable[..., tuple[np.ndarray, list[str]]]
SHIPPED = "cifar-fs-conv4"


def test_it_is_a_classifier_of_scikit_learn(learner: Learner, pictures: Pictures) -> None:
    classifier = FewShotClassifier(learner)
    assert isinstance(classifier, BaseEstimator) and isinstance(classifier, ClassifierMixin)
    assert is_classifier(classifier)
    for call in (lambda: check_is_fitted(classifier), lambda: classifier.predict(pictures(1))):
        with pytest.raises(NotFittedError):
            call()
    with pytest.raises(DataError, match="call fit"):
        classifier.predict(pictures(1))
    check_is_fitted(classifier.fit(pictures(2), ["a", "b"]))


def test_a_clone_has_the_parameters_and_not_the_pictures(learner: Learner, pictures: Pictures) -> None:
    for source in (learner, SHIPPED):
        fitted = FewShotClassifier(source, threshold=0.3, batch_size=7).fit(pictures(2), ["a", "b"])
        copied = clone(fitted)
        own, other = fitted.get_params(), copied.get_params()
        own.pop("learner"), other.pop("learner")
        assert own == other
        with pytest.raises(NotFittedError):
            copied.predict(pictures(1))
        expected = fitted.predict_proba(pictures(3, seed=1))
        found = copied.fit(pictures(2), ["a", "b"]).predict_proba(pictures(3, seed=1))
        np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("form", ["arrays", "PIL"])
def test_cross_validation(colours: Colours, form: str) -> None:
    x, labels = colours(4)
    given: Any = [Image.fromarray(picture) for picture in x] if form == "PIL" else x
    scores = cross_val_score(FewShotClassifier(SHIPPED), given, labels, cv=2)
    assert scores.tolist() == [1.0, 1.0]
    assert cross_val_predict(FewShotClassifier(SHIPPED), given, labels, cv=2).tolist() == labels


def test_several_processes(learner: Learner, colours: Colours) -> None:
    """What they need travels: a fitted classifier is the same after pickling."""
    x, labels = colours(2)
    fitted = FewShotClassifier(learner).fit(x, labels)
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_allclose(again.predict_proba(x), fitted.predict_proba(x), atol=1e-6)


def test_grid_search(colours: Colours) -> None:
    """A threshold of 1 answers unknown always: the other one is found."""
    x, labels = colours(4)
    search = GridSearchCV(FewShotClassifier(SHIPPED), {"threshold": [1.0, None]}, cv=2).fit(x, labels)
    assert search.best_params_ == {"threshold": None} and search.best_score_ == 1.0
    assert search.predict(x[:1]).tolist() == ["red"]


def test_pipelines(colours: Colours) -> None:
    """Behind a step that prepares pictures, and as the step that embeds them."""
    x, labels = colours(3)
    mirrored = FunctionTransformer(lambda pictures: pictures[:, :, ::-1])
    behind = Pipeline([("mirror", mirrored), ("classifier", FewShotClassifier(SHIPPED))])
    assert behind.fit(x, labels).score(x, labels) == 1.0
    before = make_pipeline(FewShotClassifier(SHIPPED), LogisticRegression())
    assert before.fit(x, labels).score(x, labels) == 1.0
    behind.fit(x, labels, classifier__unlabelled=x[:2])


@pytest.mark.parametrize("classes", [2, 3])
def test_calibration(colours: Colours, classes: int) -> None:
    x, labels = colours(6)
    places = np.flatnonzero(np.isin(labels, ["red", "green", "blue"][:classes]))
    x, labels = x[places], [labels[place] for place in places]
    folds = StratifiedKFold(2)
    calibrated = CalibratedClassifierCV(FewShotClassifier(SHIPPED), method="sigmoid", cv=folds).fit(x, labels)
    probabilities = calibrated.predict_proba(x)
    assert probabilities.shape == (6 * classes, classes)
    np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-6)
    assert (calibrated.predict(x) == np.array(labels)).all()


def test_unlabelled_pictures_can_be_routed(colours: Colours) -> None:
    x, labels = colours(3)
    with sklearn.config_context(enable_metadata_routing=True):
        asked = FewShotClassifier(SHIPPED).set_fit_request(unlabelled=True)
        assert asked.get_metadata_routing().fit.requests == {"unlabelled": True}
        Pipeline([("classifier", asked)]).fit(x, labels, unlabelled=x[:2])


def test_check_estimator_knows_that_it_takes_pictures() -> None:
    """By its tags: check_estimator tests what it can without a table of numbers."""
    assert not FewShotClassifier().__sklearn_tags__().input_tags.two_d_array
    with pytest.warns(SkipTestWarning, match="Can't test estimator FewShotClassifier which requires input"):
        check_estimator(FewShotClassifier(SHIPPED))


class Rows(FewShotClassifier):
    """The classifier for rows of numbers, each drawn as a picture, so that scikit-learn can test all the rest.

    X and y are called pictures and labels in the classifier itself, and what scikit-learn calls a ValueError is a
    DataError.
    """

    def fit(self, X: Any, y: Any, unlabelled: Any = None) -> Any:
        try:
            return super().fit(self._drawn(X, True), y, unlabelled)
        except DataError as error:
            raise ValueError(str(error)) from error

    def fit_transform(self, X: Any, y: Any, unlabelled: Any = None) -> Any:
        return self.fit(X, y).transform(X)

    def predict(self, X: Any) -> Any:
        return super().predict(self._drawn(X))

    def predict_proba(self, X: Any) -> Any:
        return super().predict_proba(self._drawn(X))

    def decision_function(self, X: Any) -> Any:
        return super().decision_function(self._drawn(X))

    def transform(self, X: Any) -> Any:
        return super().transform(self._drawn(X))

    def score(self, X: Any, y: Any) -> float:
        return super().score(self._drawn(X), y)

    def _drawn(self, X: Any, reset: bool = False) -> Any:
        """A column of one colour for each number; numbers that differ little differ in blue."""
        if not reset:
            self._fitted_or_refuse()
        if isinstance(X, list | np.ndarray) and np.ndim(X) == 4:
            return X
        rows = validate_data(self, X, reset=reset, dtype="float64")
        waves = np.stack([rows / 4, rows, 8 * rows], -1)
        return np.tile(0.5 + 0.5 * np.sin(waves)[:, None], (1, 4, 1, 1))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.input_tags.three_d_array = True, False
        tags.classifier_tags.poor_score = True  # a learner with random weights
        return tags


EXPECTED = {
    "check_classifiers_regression_target": "labels are names: numbers with fractions are names too",
    "check_supervised_y_2d": "a column of labels is refused, with the shape that is expected, and not flattened",
    "check_requires_y_none": "the error says in npbml's words that labels are missing",
    "check_transformer_preserve_dtypes": "embeddings have the precision of the network, not of the pictures",
}


@pytest.mark.filterwarnings("ignore")  # of scikit-learn's own data and estimators
def test_check_estimator_finds_nothing_but_what_is_expected(learner: Learner, tmp_path: Path) -> None:
    npbml.save_learner(learner, tmp_path / "tiny.safetensors")
    tiny = Rows(str(tmp_path / "tiny.safetensors"), device="cpu")
    found = check_estimator(tiny, expected_failed_checks=EXPECTED, on_fail=None, on_skip=None)
    failed = {one["check_name"]: one["exception"] for one in found if one["status"] == "failed"}
    assert failed == {}
    assert {one["check_name"] for one in found if one["status"] == "xfail"} == set(EXPECTED)
    assert sum(one["status"] == "passed" for one in found) > 50


WITHOUT = """
import sys
sys.modules["sklearn"] = None  # importing it fails
import numpy as np
import npbml

assert "torch" not in sys.modules
from npbml.classifier import NotFittedError

classifier = npbml.FewShotClassifier("cifar-fs-conv4", threshold=0.1, device="cpu")
pictures = np.random.default_rng(0).integers(0, 60, (4, 20, 20, 3), dtype=np.uint8)
pictures[2:] += 190  # two dark ones, two light ones
for error in (npbml.DataError, NotFittedError, ValueError, AttributeError):
    try:
        classifier.predict(pictures)
    except error:
        continue
    raise AssertionError(error)
classifier.fit(pictures, list("aabb")).set_params(batch_size=3)
assert classifier.predict(pictures).tolist() == list("aabb")
assert classifier.get_params() == {
    "learner": "cifar-fs-conv4", "final_batch": "auto", "batch_size": 3, "threshold": 0.1, "unknown": "unknown",
    "device": "cpu",
}
assert classifier.score(pictures, list("aabb")) == 1
assert len(classifier.fit_transform(pictures, list("aabb"))) == 4
assert repr(classifier) == (
    "FewShotClassifier(learner='cifar-fs-conv4', batch_size=3, threshold=0.1, device='cpu')"
), repr(classifier)
try:
    classifier.set_params(bach=1)
except npbml.SettingError:
    print("works")
"""


def test_it_works_without_scikit_learn() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "works\n"


def test_importing_npbml_imports_neither_scikit_learn_nor_torch() -> None:
    program = "import sys, npbml; print([name for name in ('sklearn', 'torch', 'onnx') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
