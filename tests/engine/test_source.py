"""Law C29: features that are kept give the logits of those that are computed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import npbml.engine.source as source_module
from npbml.data.tasks import ClassSet, Task
from npbml.engine.source import TaskSource
from npbml.learner import Learner
from npbml.randomness import generator


def assert_logits_of_the_tasks(learner: Learner, classes: ClassSet) -> TaskSource:
    """Logits from a source's prepared tasks = those of `predict` on the same images."""
    source = TaskSource(learner, classes, shots=2, queries=3)
    indices = source.draw(3, generator(0, "draw"))
    prepared, labels = source.prepare(indices)
    found = learner.over_tasks(learner.logits)(prepared)
    batch = classes.task(indices, 2, classes.pixels)
    assert torch.equal(labels, batch.query_labels) and found.shape == (3, 9, 3)
    for index, logits in enumerate(found):
        expected = learner.predict(Task(*(part[index] for part in batch)))
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    return source


@pytest.mark.parametrize("norm", ["batch", "running"])
@pytest.mark.parametrize("inner", ["joint", "support"])
@pytest.mark.parametrize("final", ["query", "joint"])
def test_c29_prepared_tasks_give_the_logits_of_the_images(
    make_learner: Callable[..., Learner], classes: ClassSet, norm: str, inner: str, final: str
) -> None:
    learner = make_learner(
        net={"stem_norm": norm},
        inner={"batch": inner, "final_batch": final},
        loss={"transductive": inner == "joint"},
    )
    source = assert_logits_of_the_tasks(learner, classes)
    assert (source.features is not None) is (norm == "running")


@pytest.mark.parametrize("norm", ["batch", "running"])
def test_c29_holds_where_the_whole_encoder_is_the_stem(
    make_learner: Callable[..., Learner], classes: ClassSet, ce_only: dict[str, Any], norm: str
) -> None:
    learner = make_learner(
        net={"frozen_blocks": 4, "stem_norm": norm},
        warp={"kind": "fixed"},
        film={"enabled": False},
        loss=ce_only,
    )
    assert_logits_of_the_tasks(learner, classes)


def test_c29_features_that_do_not_fit_are_computed_for_each_task(
    make_learner: Callable[..., Learner], classes: ClassSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner(net={"stem_norm": "running"})
    # 30 images of 4 maps of 4 x 4 doubles.
    for limit, kept in ((30 * 4 * 16 * 8, True), (30 * 4 * 16 * 8 - 1, False)):
        monkeypatch.setattr(source_module, "CACHE_BYTES", limit)
        assert (assert_logits_of_the_tasks(learner, classes).features is not None) is kept


def test_c29_features_are_kept_in_the_order_of_the_images(
    make_learner: Callable[..., Learner], classes: ClassSet
) -> None:
    learner = make_learner(net={"stem_norm": "running"})
    features = TaskSource(learner, classes, 1, 1).features
    assert features is not None and len(features) == 30 and not features.requires_grad
    for index in (0, 17, 29):
        alone = learner.network.stem(learner.see(classes.pixels(torch.tensor([index]))))
        torch.testing.assert_close(features[index : index + 1], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm", ["batch", "running"])
def test_c29_images_that_look_different_are_not_taken_from_the_kept_features(
    make_learner: Callable[..., Learner], classes: ClassSet, norm: str
) -> None:
    learner = make_learner(net={"stem_norm": norm})
    source = TaskSource(learner, classes, shots=2, queries=3)
    indices = source.draw(2, generator(0, "draw"))
    prepared, _ = source.prepare(indices, lambda places: classes.pixels(places).flip(-1))
    batch = classes.task(indices, 2, classes.pixels)
    mirrored = batch._replace(
        support_images=batch.support_images.flip(-1), query_images=batch.query_images.flip(-1)
    )
    for mine, expected in zip(prepared, learner.prepare_tasks(mirrored), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-10)
