"""Law C29: features that are kept give the logits of those that are computed."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import npbml.engine.source as source_module
from npbml.data.tasks import ClassSet
from npbml.engine.execute import Executor
from npbml.engine.source import Cache, Partners, TaskSource
from npbml.learner.learner import Learner
from npbml.learner.prepare import embeddings, normalised
from npbml.methods import find_recipe
from npbml.randomness import generator
from npbml.shapes import benchmark_shape, read_shape

ONE_SHOT = benchmark_shape(3, 1, 1)


def assert_logits_of_the_tasks(
    learner: Learner, classes: ClassSet, precision: str = "float32", atol: float = 1e-10
) -> TaskSource:
    """Logits from a source's prepared tasks = those of `predict` on the same images."""
    source = TaskSource(learner, classes, benchmark_shape(learner.settings.ways, 2, 3), precision=precision)
    indices = source.draw(3, generator(0, "draw"))
    prepared, labels = source.prepare(indices)
    found = Executor(learner).logits(prepared)
    batch = classes.task(indices, 2, classes.pixels)
    assert torch.equal(labels, batch.query_labels) and found.shape == (3, 9, 3)
    for index, logits in enumerate(found):
        expected = learner.predict(batch.map(lambda part, i=index: part[i]))
        torch.testing.assert_close(logits, expected, rtol=0, atol=atol)
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
    assert ("features" in source.known) is (norm == "running")


@pytest.mark.parametrize("norm", ["batch", "running"])
@pytest.mark.parametrize("kind", ["encoder", "prototypes"])
def test_c29_holds_for_embeddings_that_are_scored(
    make_learner: Callable[..., Learner], classes: ClassSet, norm: str, kind: str
) -> None:
    learner = make_learner(scorer={"kind": kind}, net={"stem_norm": norm}, warp={"kind": "none"})
    source = assert_logits_of_the_tasks(learner, classes)
    assert ("embeddings" in source.known) is (kind == "encoder" or norm == "running")
    assert ("features" in source.known) is (norm == "running")


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


def test_c29_features_that_do_not_fit_are_kept_on_disk_or_computed_for_each_task(
    make_learner: Callable[..., Learner],
    classes: ClassSet,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    learner = make_learner(net={"stem_norm": "running"})
    room = 30 * 4 * 16 * 8  # images of 4 maps of 4 x 4 doubles
    monkeypatch.setattr(source_module, "CACHE_BYTES", room)
    in_memory = assert_logits_of_the_tasks(learner, classes).known["features"]
    monkeypatch.setattr(source_module, "CACHE_BYTES", room - 1)
    mapped = assert_logits_of_the_tasks(learner, classes, atol=1e-2).known["features"]
    assert in_memory.dtype == torch.float64 and mapped.dtype == torch.float16
    torch.testing.assert_close(mapped.double(), in_memory, rtol=2**-11, atol=1e-7)
    assert not list((tmp_path / "npbml").iterdir())  # the file goes with the process
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=room // 4))
    assert not assert_logits_of_the_tasks(learner, classes).known


@pytest.mark.parametrize(("precision", "dtype"), [("tf32", torch.float16), ("bfloat16", torch.bfloat16)])
def test_c29_features_are_kept_in_half_precision_where_products_are_rounded_as_much(
    make_learner: Callable[..., Learner], classes: ClassSet, precision: str, dtype: torch.dtype
) -> None:
    learner = make_learner(net={"stem_norm": "running"}).float()
    source = assert_logits_of_the_tasks(learner, classes, precision, atol=0.3)
    assert source.known["features"].dtype == dtype
    prepared, _ = source.prepare(source.draw(2, generator(0, "draw")))
    assert {part.dtype for part in prepared} == {torch.float32}


def test_sources_with_the_same_stem_share_its_features(
    make_learner: Callable[..., Learner], classes: ClassSet, ce_only: dict[str, Any]
) -> None:
    cache: Cache = {}
    one = TaskSource(make_learner(net={"stem_norm": "running"}), classes, ONE_SHOT, cache=cache)
    other = TaskSource(make_learner(net={"stem_norm": "running"}, loss=ce_only), classes, ONE_SHOT, cache=cache)
    assert one.known["features"] is other.known["features"] and len(cache) == 1
    changed = make_learner(net={"stem_norm": "running"})
    changed.network.stem.blocks[0].unit.conv.weight += 0.1
    also = dataclasses.replace(classes, images=classes.images.clone())
    for learner, images in ((changed, classes), (make_learner(net={"stem_norm": "running"}), also)):
        assert TaskSource(learner, images, ONE_SHOT, cache=cache).known["features"] is not one.known["features"]


def test_embeddings_of_other_views_are_not_shared_with_those_of_images_as_they_stand(
    make_learner: Callable[..., Learner], classes: ClassSet
) -> None:
    cache: Cache = {}
    learners = [
        make_learner(scorer={"kind": "encoder", **views})
        for views in ({}, {"rotations": True}, {"enlarge": 1.5}, {"flip": True})
    ]
    plain, turned, large, mirrored = (
        TaskSource(learner, classes, ONE_SHOT, cache=cache).known["embeddings"] for learner in learners
    )
    width = plain.shape[1]
    assert turned.shape == (30, 4 * width) and large.shape == plain.shape
    torch.testing.assert_close(turned[:, :width], plain)
    assert (large - plain).abs().min() > 1e-9
    assert mirrored.shape == plain.shape and (mirrored - plain).abs().max() > 1e-9


@pytest.mark.parametrize("norm", ["batch", "running"])
@pytest.mark.parametrize("enlarge", [1.0, 1.5])
def test_c29_embeddings_of_both_networks_are_those_of_the_two(
    make_learner: Callable[..., Learner], classes: ClassSet, norm: str, enlarge: float
) -> None:
    views = {"rotations": True, "enlarge": enlarge}

    def learner(kind: str) -> Learner:
        made = make_learner(net={"stem_norm": norm}, scorer={"kind": kind, **views})
        if kind != "both":
            part = "encoder" if kind == "encoder" else "tail"
            getattr(made.scorer, part).load_state_dict(getattr(both.scorer, part).state_dict())
        return made

    both = make_learner(net={"stem_norm": norm}, scorer={"kind": "both", **views})
    indices = classes.draw(2, 3, 2, 3, generator(0, "draw"))
    images = classes.task(indices, 2, classes.pixels).support_images[0]
    seen = normalised(both, images)
    parts = [embeddings(learner(kind), seen) for kind in ("encoder", "prototypes")]
    torch.testing.assert_close(embeddings(both, seen), torch.cat(parts, 1), rtol=0, atol=1e-12)
    source = assert_logits_of_the_tasks(both, classes)
    assert ("embeddings" in source.known) == (norm == "running")


def test_c29_features_are_kept_in_the_order_of_the_images(
    make_learner: Callable[..., Learner], classes: ClassSet
) -> None:
    learner = make_learner(net={"stem_norm": "running"})
    features = TaskSource(learner, classes, ONE_SHOT).known["features"]
    assert len(features) == 30 and not features.requires_grad
    for index in (0, 17, 29):
        alone = learner.network.stem(normalised(learner, classes.pixels(torch.tensor([index]))))
        torch.testing.assert_close(features[index : index + 1], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm", ["batch", "running"])
def test_c29_images_that_look_different_are_not_taken_from_the_kept_features(
    make_learner: Callable[..., Learner], classes: ClassSet, norm: str
) -> None:
    learner = make_learner(net={"stem_norm": norm})
    source = TaskSource(learner, classes, benchmark_shape(learner.settings.ways, 2, 3))
    indices = source.draw(2, generator(0, "draw"))
    prepared, _ = source.prepare(indices, lambda places: classes.pixels(places).flip(-1))
    batch = classes.task(indices, 2, classes.pixels)
    mirrored = batch._replace(
        support_images=batch.support_images.flip(-1), query_images=batch.query_images.flip(-1)
    )
    for mine, expected in zip(prepared, learner.prepare_batch(mirrored), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-10)


def test_frozen_work_that_takes_long_is_told_beforehand(
    make_learner: Callable[..., Learner], classes: ClassSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, told = make_learner(net={"stem_norm": "running"}), []
    TaskSource(learner, classes, ONE_SHOT, say=told.append)
    assert not told
    monkeypatch.setattr("npbml.engine.source.SLOW", 0.0)
    TaskSource(learner, classes, ONE_SHOT, say=told.append)
    assert told == ["The features of 30 images are computed once, in about 0 min."]


@pytest.mark.parametrize("shape", ["3x1+3/1", "2x~2+~3/1"])
def test_classes_are_mixed_with_their_partners(
    make_learner: Callable[..., Learner], classes: ClassSet, shape: str
) -> None:
    """Of weight 1 nothing is mixed; else an item is mixed with that of its partner class in the same place."""
    rule = dict(find_recipe("npbml-any").rule)
    learner = make_learner(**{**rule, "net": {**rule["net"], "filters": 4}})
    source = TaskSource(learner, classes, read_shape(shape))
    drawn, others = (source.draw(2, generator(0, name)) for name in ("own", "others"))
    ways = source.shape.ways
    plain, labels = source.prepare(drawn)
    same, _ = source.prepare(drawn, partners=Partners(others, torch.ones(2, ways, dtype=torch.float64)))
    for one, other in zip(plain, same, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    half, found = source.prepare(drawn, partners=Partners(others, torch.full((2, ways), 0.5, dtype=torch.float64)))
    assert torch.equal(labels, found)
    features, images = source.known["features"], drawn.shape[-1] - (0 if source.shape.equal else 2)
    first = 0.5 * (features[drawn[0, 0, 0]] + features[others[0, 0, 0]])
    torch.testing.assert_close(half.inner[0, 0], first.to(half.inner), rtol=0, atol=1e-6)
    assert images == others.shape[-1] - (0 if source.shape.equal else 2)
