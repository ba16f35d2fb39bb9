"""Tests on tasks of many shapes: how a method depends on ways, shots, the pool and its balance.

Each method leaves METHOD/shapes.json: for each shape its figures and the accuracy of every task, so that methods
can be compared task by task. Beside them stand nearest class means and soft k-means, on the same embeddings.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from npbml.engine.baselines import PROTOTYPES, FixedMeans, best_means, mean_answers, mean_temperature
from npbml.engine.calibration import expected_calibration_error
from npbml.engine.capture import Replay
from npbml.engine.distributed import on_rank_zero
from npbml.engine.evaluate import Answer, Evaluation, evaluate, learner_answers, over_tasks
from npbml.engine.source import TaskSource
from npbml.errors import DataError, SettingError
from npbml.json_files import read_json, write_json
from npbml.lab.run import Run
from npbml.lab.schema import method_config, override
from npbml.lab.weights import fresh_learner
from npbml.learner.learner import Learner
from npbml.measures import ACCURACY, Figure
from npbml.shapes import Shape, read_shapes

Tick = Callable[[int], None]
SOFT_KMEANS = "soft k-means"
BASELINES = ("prototypes", SOFT_KMEANS)
CHOSEN_BY = 100  # validation tasks of a shape by which soft k-means is set


def tested_shapes(run: Run) -> tuple[Shape, ...]:
    """The shapes that a run's methods are tested on, beside that of the benchmark."""
    return read_shapes(run.config.test.shapes)


def try_shapes(run: Run, method: str, learners: list[Learner], tick: Tick, split: str = "test") -> dict[str, Any]:
    """Test a method's learners on each shape, and keep what is found."""

    def answer(shape: Shape) -> tuple[TaskSource, Answer, float]:
        source = run.task_source(learners[0], run.splits[split], shape)
        replay = Replay("test", run.device.type == "cuda" and source.on_device, run.observer.said)
        return source, learner_answers(learners, source, replay, tasks=run.config.engine.tasks), 1.0

    return _tested(run, method, answer, tick, split)


def try_baselines(run: Run, tick: Tick, split: str = "test") -> dict[str, dict[str, Any]]:
    """Test nearest class means and soft k-means on each shape; the numbers of soft k-means are chosen for it."""
    learner = embedding_learner(run)
    config, found = run.config, {}
    by = CHOSEN_BY, config.test.batch_size, config.seed
    for name in BASELINES:

        def answer(shape: Shape, name: str = name) -> tuple[TaskSource, Answer, float]:
            source = run.task_source(learner, run.splits[split], shape)
            known = run.task_source(learner, run.splits["val"], shape)
            how: FixedMeans = best_means(known, *by) if name == SOFT_KMEANS else PROTOTYPES
            return source, mean_answers(source, how), mean_temperature(known, how, *by)

        found[name] = _tested(run, name, answer, tick, split)
    return found


def embedding_learner(run: Run) -> Learner:
    """A learner whose tasks have the embeddings of the encoder as it was pre-trained, each image by itself."""
    config = method_config(run.config, "npbml-any")
    return fresh_learner(run, override(config, {"scorer": {"kind": "prototypes"}}))


def _tested(
    run: Run, method: str, answer: Callable[[Shape], tuple[TaskSource, Answer, float]], tick: Tick, split: str
) -> dict[str, Any]:
    config, found = run.config, {}
    purpose = "test" if split == "test" else "validation"
    for shape in tested_shapes(run):
        try:
            source, answers, temperature = answer(shape)
        except (DataError, SettingError) as error:
            found[str(shape)] = {"refused": str(error)}
            continue

        def tempered(logits: Tensor, temperature: float = temperature) -> Tensor:
            return logits.double() / temperature

        tasks, batch_size = config.test.shape_tasks, _batch_size(shape, config.test.batch_size)
        outcome = evaluate(
            answers, source.draw, tasks, batch_size, config.seed, purpose, tick=tick, as_logits=tempered
        )
        found[str(shape)] = _figures(outcome)
    on_rank_zero(lambda: write_json(_file(run, method, split), found))
    return found


def _batch_size(shape: Shape, batch_size: int) -> int:
    """Fewer tasks at once where they are large."""
    return max(1, min(batch_size, batch_size * 150 // (shape.support + shape.scored)))


def _figures(found: Evaluation) -> dict[str, Any]:
    assert found.log_loss is not None and found.bins is not None
    result = over_tasks(ACCURACY, found.per_task)
    return {
        "accuracy": round(result.mean, 3),
        "ci95": round(result.ci95, 3),
        "nll": round(found.log_loss.mean().item(), 4),
        "ece": round(expected_calibration_error(found.bins).item(), 2),
        "per_task": [round(value, 5) for value in found.per_task.tolist()],
    }


def _file(run: Run, method: str, split: str) -> Any:
    name = "shapes.json" if split == "test" else f"shapes-{split}.json"
    return run.folder / method.replace(" ", "-") / name


def known_shapes(run: Run, methods: Iterable[str], split: str = "test") -> dict[str, dict[str, Any]]:
    """What was found of methods and baselines, by method and shape."""
    files = {name: _file(run, name, split) for name in dict.fromkeys([*methods, *BASELINES])}
    return {name: read_json(file) for name, file in files.items() if file.exists()}


def paired_on(shape: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> Figure | None:
    """The difference of two methods over the tasks of a shape that both were given."""
    found = [
        torch.tensor(one[shape]["per_task"]).double() for one in (mine, theirs) if "per_task" in one.get(shape, {})
    ]
    if len(found) < 2:
        return None
    count = min(map(len, found))
    return over_tasks(ACCURACY, found[0][:count] - found[1][:count])
