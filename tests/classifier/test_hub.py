"""Folders and the Hub: what is written is read again; uploads are tested with the upload replaced."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest

from npbml import FewShotClassifier, RunError
from npbml.learner.learner import Learner

Pictures = Callable[..., np.ndarray]


@pytest.fixture
def classifier(learner: Learner, pictures: Pictures) -> FewShotClassifier:
    return FewShotClassifier(learner, threshold=0.2).fit(pictures(4), ["a", "a", "b", "b"])


def test_a_folder_is_read_again(classifier: FewShotClassifier, pictures: Pictures, tmp_path: Path) -> None:
    classifier.save_pretrained(tmp_path / "flowers", thumbnails=True)
    assert sorted(path.name for path in (tmp_path / "flowers").iterdir()) == ["README.md", "classifier.npbml"]
    for source in (tmp_path / "flowers", str(tmp_path / "flowers"), tmp_path / "flowers" / "classifier.npbml"):
        loaded = FewShotClassifier.from_pretrained(source, device="cpu")
        query = pictures(3, seed=1)
        np.testing.assert_allclose(loaded.predict_proba(query), classifier.predict_proba(query), atol=1e-6)
        assert loaded.threshold == 0.2 and loaded.thumbnails_.shape == (4, 32, 32, 3)


def test_the_card_can_be_read_by_the_hub(classifier: FewShotClassifier, tmp_path: Path) -> None:
    classifier.save_pretrained(tmp_path)
    card = huggingface_hub.ModelCard.load(tmp_path / "README.md")
    assert card.data.library_name == "npbml" and card.data.pipeline_tag == "image-classification"
    assert "| a | 2 |" in card.text and "below 0.2" in card.text


def test_what_is_uploaded_can_be_downloaded(
    classifier: FewShotClassifier, pictures: Pictures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, calls = tmp_path / "remote", list[Any]()

    def create(self: Any, repo_id: str, **options: Any) -> Any:
        calls.append((repo_id, options))
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")

    def upload(self: Any, *, repo_id: str, folder_path: str, **options: Any) -> None:
        calls.append((repo_id, options))
        remote.mkdir()
        for file in Path(folder_path).iterdir():
            (remote / file.name).write_bytes(file.read_bytes())

    def download(repo_id: str, filename: str, **options: Any) -> str:
        calls.append((repo_id, options))
        return str(remote / filename)

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    address = classifier.push_to_hub("someone/flowers", private=True, revision="draft")
    assert address == "https://huggingface.co/someone/flowers"
    loaded = FewShotClassifier.from_pretrained("someone/flowers", revision="draft", device="cpu")
    query = pictures(3, seed=1)
    np.testing.assert_allclose(loaded.predict_proba(query), classifier.predict_proba(query), atol=1e-6)
    assert calls == [
        ("someone/flowers", {"private": True, "exist_ok": True}),
        ("someone/flowers", {"commit_message": "A classifier of npbml", "revision": "draft"}),
        ("someone/flowers", {"revision": "draft"}),
    ]


def test_what_fails_is_said_in_a_sentence(
    classifier: FewShotClassifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any, **options: Any) -> Any:
        raise OSError("no connection\nand more words")

    with pytest.raises(RunError, match=r"has no classifier\.npbml in it"):
        FewShotClassifier.from_pretrained(tmp_path)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fails)
    with pytest.raises(RunError, match=r"someone/x could not be downloaded from the Hub: no connection$"):
        FewShotClassifier.from_pretrained("someone/x")
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", fails)
    with pytest.raises(RunError, match=r"someone/x could not be uploaded to the Hub: no connection$"):
        classifier.push_to_hub("someone/x")


def test_a_missing_extra_is_named(
    classifier: FewShotClassifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders need none."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for call in (
        lambda: classifier.push_to_hub("someone/x"),
        lambda: FewShotClassifier.from_pretrained("someone/x"),
    ):
        with pytest.raises(RunError, match=r"pip install 'npbml\[hub\]'"):
            call()
    classifier.save_pretrained(tmp_path)
    FewShotClassifier.from_pretrained(tmp_path)
