"""Classifiers in files: what is read is what was saved, and a file that is not right is refused in a sentence."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import npbml.json_files
from npbml import DataError, FewShotClassifier, NpbmlError, RunError
from npbml.learner.learner import Learner
from npbml.tensor_files import load_tensors, save_tensors

Pictures = Callable[..., np.ndarray]
LABELS = ["cat", "cat", "dog", "dog", "eel", "eel"]


@pytest.fixture
def saved(learner: Learner, pictures: Pictures, tmp_path: Path) -> Path:
    FewShotClassifier(learner).fit(pictures(6), LABELS, pictures(5, seed=1)).save(tmp_path / "x.npbml")
    return tmp_path / "x.npbml"


@pytest.mark.parametrize("pool", [0, 5])
def test_what_is_loaded_answers_and_grows_as_what_was_saved(
    learner: Learner, pictures: Pictures, tmp_path: Path, pool: int
) -> None:
    query = pictures(4, seed=2)
    classifier = FewShotClassifier(learner, threshold=0.4, unknown="other", batch_size=3)
    classifier.fit(pictures(6), LABELS, pictures(5, seed=1)[:pool]).save(tmp_path / "x.npbml")
    loaded = FewShotClassifier.load(tmp_path / "x.npbml", device="cpu")
    assert loaded.get_params() == {**classifier.get_params(), "learner": loaded.learner_, "device": "cpu"}
    np.testing.assert_allclose(loaded.predict_proba(query), classifier.predict_proba(query), atol=1e-6)
    assert loaded.predict(query).tolist() == classifier.predict(query).tolist()
    more = pictures(2, seed=4)
    for one in (classifier, loaded):
        one.add(more, ["cat", "owl"])
    assert loaded.classes_.tolist() == ["cat", "dog", "eel", "owl"]
    np.testing.assert_allclose(loaded.predict_proba(query), classifier.predict_proba(query), atol=1e-6)
    assert str(loaded.leave_one_out()) == str(classifier.leave_one_out())


def test_a_learner_that_predicts_together_is_saved_too(
    make_learner: Callable[..., Learner], pictures: Pictures, tmp_path: Path
) -> None:
    learner = make_learner(channels=3, scorer={"widths": [2, 3]}).float()
    classifier = FewShotClassifier(learner, "joint").fit(pictures(6), LABELS)
    classifier.save(tmp_path / "x.npbml")
    loaded = FewShotClassifier.load(tmp_path / "x.npbml", device="cpu")
    query = pictures(4, seed=2)
    np.testing.assert_allclose(loaded.predict_proba(query), classifier.predict_proba(query), atol=1e-6)


def test_saving_twice_gives_the_same_bytes(learner: Learner, pictures: Pictures, tmp_path: Path) -> None:
    classifier = FewShotClassifier(learner).fit(pictures(6), LABELS)
    for name in ("a.npbml", "b.npbml"):
        classifier.save(tmp_path / name)
    assert (tmp_path / "a.npbml").read_bytes() == (tmp_path / "b.npbml").read_bytes()


@pytest.mark.parametrize(
    "labels",
    [["a", "b"], [1, 2], [0.5, 1.0], [False, True], [("a", 1), ("a", (2.5, True))], ["a", 1], [2**70, -1]],
)
def test_classes_keep_their_kind(learner: Learner, pictures: Pictures, tmp_path: Path, labels: list[Any]) -> None:
    classifier = FewShotClassifier(learner).fit(pictures(2), labels)
    classifier.save(tmp_path / "x.npbml")
    loaded = FewShotClassifier.load(tmp_path / "x.npbml")
    assert loaded.classes_.dtype == classifier.classes_.dtype
    assert repr(loaded.classes_.tolist()) == repr(classifier.classes_.tolist())


@pytest.mark.parametrize("label", [b"a", frozenset("a"), 1j, np.datetime64("2026-01-01"), Path("a")])
def test_classes_that_json_does_not_know_are_refused(
    learner: Learner, pictures: Pictures, tmp_path: Path, label: Any
) -> None:
    classifier = FewShotClassifier(learner).fit(pictures(2), [label, "b"])
    with pytest.raises(DataError, match="cannot be saved: names of classes are strings"):
        classifier.save(tmp_path / "x.npbml")
    assert not list(tmp_path.iterdir())


def test_thumbnails_are_kept_if_wanted(learner: Learner, pictures: Pictures, tmp_path: Path) -> None:
    classifier = FewShotClassifier(learner).fit(pictures(6), LABELS)
    assert classifier.thumbnails_.shape == (6, 32, 32, 3)
    for wanted, shape in ((False, (6, 0, 0, 3)), (True, (6, 32, 32, 3))):
        classifier.save(tmp_path / "x.npbml", thumbnails=wanted)
        loaded = FewShotClassifier.load(tmp_path / "x.npbml")
        assert loaded.thumbnails_.shape == shape and loaded.example_labels_.tolist() == LABELS
        if wanted:
            np.testing.assert_array_equal(loaded.thumbnails_, classifier.thumbnails_)
        loaded.add(pictures(1, seed=3), ["cat"]).predict(pictures(1))


def test_the_card_says_what_it_was_made_from(saved: Path) -> None:
    card = load_tensors(saved)[1]["card"]
    assert "from 6 labelled pictures and 5 unlabelled ones" in card and "| cat | 2 |" in card
    assert card == FewShotClassifier.load(saved).card()


def test_names_of_folders_stay_at_home(learner: Learner, pictures: Pictures, tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "private").mkdir()
    for number, picture in enumerate(pictures(2)):
        Image.fromarray(picture).save(tmp_path / "private" / f"{number}.png")
    files = [tmp_path / "private" / f"{number}.png" for number in range(2)]
    FewShotClassifier(learner).fit(files, ["a", "b"]).save(tmp_path / "x.npbml")
    assert b"private" not in (tmp_path / "x.npbml").read_bytes()
    assert FewShotClassifier.load(tmp_path / "x.npbml")._fitted.labelled.names == ("0.png", "1.png")


def test_a_full_disk_loses_nothing(
    learner: Learner, pictures: Pictures, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(npbml.json_files.os, "fsync", full)
    with pytest.raises(RunError, match="could not be saved: No space left on device"):
        FewShotClassifier(learner).fit(pictures(2), ["a", "b"]).save(saved)
    assert saved.read_bytes() == before and [path.name for path in saved.parent.iterdir()] == ["x.npbml"]


def refused(path: Path, match: str) -> None:
    with pytest.raises(RunError, match=match) as error:
        FewShotClassifier.load(path, device="cpu")
    assert str(path) in str(error.value)


@pytest.mark.parametrize("content", [b"", b"text", b"\0" * 100, b"\xff" * 64, b"PK\x03\x04" + b"\0" * 40])
def test_what_is_no_file_of_npbml_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.npbml").write_bytes(content)
    refused(tmp_path / "x.npbml", "is damaged or not one of npbml's files")


def test_other_files_and_places_are_refused(learner: Learner, tmp_path: Path) -> None:
    refused(tmp_path / "missing.npbml", "is not there")
    refused(tmp_path, "is not there")
    npbml.save_learner(learner, tmp_path / "learner.safetensors")
    refused(tmp_path / "learner.safetensors", r"does not hold a classifier; FewShotClassifier\.save")
    save_file({"x": torch.zeros(2)}, tmp_path / "other.safetensors")
    refused(tmp_path / "other.safetensors", "is damaged or not one of npbml's files")
    save_file({"x": torch.zeros(2)}, tmp_path / "deep.npbml", {"about": "[" * 100_000})
    refused(tmp_path / "deep.npbml", "is damaged")
    save_file({"x": torch.zeros(2)}, tmp_path / "list.npbml", {"about": "[1]"})
    refused(tmp_path / "list.npbml", "its metadata are not a table")


@pytest.mark.parametrize("part", range(12))
def test_a_single_flipped_bit_is_found(saved: Path, part: int) -> None:
    content = bytearray(saved.read_bytes())
    place = 9 + part * (len(content) - 10) // 11
    content[place] ^= 4
    saved.write_bytes(content)
    with pytest.raises(RunError):
        FewShotClassifier.load(saved)


def test_half_a_file_is_refused(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes()[:-100])
    refused(saved, "is damaged")


def tampered(path: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]) -> None:
    """The file with other content, under a digest that is right."""
    tensors, about = load_tensors(path)
    change(tensors, about)
    save_tensors(path, tensors, about)


def put(name: str, value: Any) -> Callable[[dict[str, torch.Tensor], dict[str, Any]], None]:
    """Set an entry of the metadata, by dots."""

    def change(tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
        *way, last = name.split(".")
        for step in way:
            about = about[step]
        about[last] = value

    return change


def replace(name: str, change_of: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:
    """Change a tensor, or drop it."""

    def change(tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
        new = change_of(tensors.pop(name))
        if new is not None:
            tensors[name] = new

    return change


@pytest.mark.parametrize(
    "change",
    [
        put("version", 2),
        put("version", None),
        put("format", "another"),
        put("classes", ["cat", "dog"]),
        put("classes", ["cat", "dog", "dog"]),
        put("classes", ["cat", "dog", None]),
        put("classes", ["cat", "dog", ["eel"]]),
        put("classes", ["cat", "dog", {"eel": 1}]),
        put("classes", ["cat", "dog", float("nan")]),
        put("classes", ["cat", "dog", "eel", "owl"]),
        put("classes", 3),
        put("temperature", 0),
        put("temperature", float("nan")),
        put("temperature", "warm"),
        put("names", ["a"]),
        put("names", [1] * 6),
        put("names", None),
        put("parameters", {}),
        put("parameters", None),
        put("parameters.batch_size", 0),
        put("parameters.batch_size", "many"),
        put("parameters.threshold", 7),
        put("parameters.final_batch", "none"),
        put("parameters.unknown", None),
        put("parameters.learner", "other"),
        put("images.size", 10**9),
        put("images.size", 0),
        put("images.size", "large"),
        put("images.channels", 7),
        put("images.std", [0, 0, 0]),
        put("images.mean", [0.5]),
        put("images", None),
        put("settings.net.filters", 10**12),
        put("settings.net.filters", 7),
        put("settings.backbone", "none-such"),
        put("settings.no_such", 1),
        put("settings", []),
        replace("labelled.codes", lambda codes: codes + 1),
        replace("labelled.codes", lambda codes: codes * 0),
        replace("labelled.codes", lambda codes: codes.float()),
        replace("labelled.codes", lambda codes: codes[:5]),
        replace("labelled.codes", lambda codes: None),
        replace("labelled.items", lambda items: items[:, :1].contiguous()),
        replace("labelled.items", lambda items: items * float("nan")),
        replace("labelled.items", lambda items: items.double()),
        replace("labelled.items", lambda items: items[:4]),
        replace("labelled.digests", lambda digests: digests[:, :5].contiguous()),
        replace("labelled.thumbnails", lambda thumbnails: thumbnails.float()),
        replace("unlabelled.items", lambda items: items[:1]),
        replace("unlabelled.items", lambda items: torch.tensor(1.0)),
        replace("theta.head.weight", lambda weight: weight[:2]),
        replace("theta.head.weight", lambda weight: weight / 0),
        replace("theta.head.weight", lambda weight: None),
        replace("learner.head.weight", lambda weight: None),
        replace("learner.head.weight", lambda weight: weight * float("inf")),
        replace("learner.head.weight", lambda weight: weight[:, :2].contiguous()),
    ],
)
def test_a_crafted_file_is_refused_in_a_sentence(saved: Path, change: Any) -> None:
    tampered(saved, change)
    refused(saved, r"^.*x\.npbml .*")


def test_tampering_that_changes_nothing_is_no_damage(saved: Path) -> None:
    tampered(saved, lambda tensors, about: None)
    FewShotClassifier.load(saved)


def test_an_encoder_that_is_missing_is_named(saved: Path) -> None:
    tampered(saved, put("settings.backbone", "none-such"))
    with pytest.raises(NpbmlError, match="none-such"):
        FewShotClassifier.load(saved)
