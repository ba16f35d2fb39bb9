"""Tests on tasks of many shapes: what is kept, what is refused, what stands beside the methods."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from npbml.data.draws import task_items
from npbml.engine.baselines import PROTOTYPES, mean_answers
from npbml.engine.evaluate import learner_answers
from npbml.lab.pipeline import Pipeline
from npbml.lab.schema import Config, override
from npbml.lab.shape_tests import BASELINES, embedding_learner, known_shapes, paired_on
from npbml.lab.weights import read_learner
from npbml.randomness import generator
from npbml.shapes import read_shape

SHAPES = ("2x1/2", "3x1+9/0", "2x~2+~4/1", "3x1+600")


@pytest.fixture(scope="module")
def tested(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """A run of npbml, which takes three classes, and of the two methods for any number of them."""
    settings: dict[str, Any] = {"test": {"tasks": 3, "shapes": list(SHAPES), "shape_tasks": 5}}
    run = Pipeline.start(tmp_path_factory.mktemp("runs") / "shapes", override(config, settings))
    for stage in ("pretrain", "relation", "npbml", "npbml-any", "maml-any"):
        run.run(stage)
    for method in ("npbml", "npbml-any", "maml-any"):
        run.test(method)
    run.test_baselines()
    return run


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_each_method_keeps_the_result_of_every_task(tested: Pipeline) -> None:
    found = known_shapes(tested, ["npbml-any", "maml-any"])
    assert list(found) == ["npbml-any", "maml-any", *BASELINES]
    for method, figures in found.items():
        assert list(figures) == list(SHAPES), method
        for shape in SHAPES[:3]:
            row = figures[shape]
            assert len(row["per_task"]) == 5 and 0 <= row["ece"] <= 100 and row["nll"] > 0
            assert row["accuracy"] == pytest.approx(100 * sum(row["per_task"]) / 5, abs=2e-3)
        assert "too few" in figures["3x1+600"]["refused"]


def test_a_method_that_cannot_take_a_shape_says_so(tested: Pipeline) -> None:
    figures = read(tested.folder / "npbml" / "shapes.json")
    assert "slot for each of 3 classes" in figures["2x1/2"]["refused"]
    assert "accuracy" in figures["3x1+9/0"]


def test_what_is_kept_is_what_the_learner_answers(tested: Pipeline) -> None:
    learner, shape = read_learner(tested, "npbml-any"), read_shape("2x~2+~4/1")
    source = tested.task_source(learner, tested.splits["test"], shape)
    indices = source.draw(100, generator(0, "test", 0))[:5]
    logits, labels = learner_answers(learner, source)(indices)
    expected = (logits.argmax(-1) == labels).double().mean(-1)
    found = read(tested.folder / "npbml-any" / "shapes.json")[str(shape)]["per_task"]
    torch.testing.assert_close(torch.tensor(found).double(), expected, rtol=0, atol=1e-5)


def test_an_alone_query_gets_the_answer_of_the_nearest_mean(tested: Pipeline) -> None:
    learner, shape = embedding_learner(tested), read_shape("2x1/2")
    source = tested.task_source(learner, tested.splits["test"], shape)
    indices = source.draw(2, generator(1, "draw"))
    logits, _ = mean_answers(source, PROTOTYPES)(indices)
    support, labels, query, _ = task_items(shape, indices)
    for task in range(2):
        means, queries = source.known["embeddings"][support[task]], source.known["embeddings"][query[task]]
        assert labels[task].tolist() == [0, 1]
        cosines = torch.nn.functional.cosine_similarity(queries[:, None], means[None], dim=-1)
        torch.testing.assert_close(logits[task], 10 * cosines, rtol=0, atol=1e-5)


def test_differences_are_paired(tested: Pipeline) -> None:
    found = known_shapes(tested, ["npbml-any", "maml-any"])
    one, other = found["npbml-any"], found["maml-any"]
    difference = paired_on("3x1+9/0", one, other)
    assert difference is not None
    assert difference.mean == pytest.approx(one["3x1+9/0"]["accuracy"] - other["3x1+9/0"]["accuracy"], abs=1e-2)
    assert paired_on("3x1+600", one, other) is None


def test_a_learner_of_shapes_leaves_out_those_that_classes_cannot_fill(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Pipeline.start(tmp_path / "run", override(config, {"method": "npbml-any"}))
    run.run("pretrain")
    learner = run.run("npbml-any")
    assert learner["steps"] == 2  # the three classes of validation cannot fill most of its shapes
