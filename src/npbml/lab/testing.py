"""The test of a method on meta-test tasks, and its record."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from npbml.data.tasks import ClassSet
from npbml.engine.calibration import best_temperature, expected_calibration_error, score_logits
from npbml.engine.capture import Replay
from npbml.engine.device import describe_device
from npbml.engine.distributed import on_rank_zero
from npbml.engine.evaluate import Answer, Draw, Evaluation, all_answers, evaluate, learner_answers, over_tasks
from npbml.lab.run import Run
from npbml.lab.shape_tests import try_shapes
from npbml.lab.stages import needed, spec_of, stage_value
from npbml.lab.weights import pretrained_network, read_learner
from npbml.learner.learner import Learner
from npbml.measures import ACCURACY, Figure
from npbml.methods import trains
from npbml.stages.pretrain import prototype_answers
from npbml.version import __version__

Tick = Callable[[int], None]  # is told how many more tasks are done


def test_method(run: Run, method: str, tick: Tick, dataset: str | None = None) -> dict[str, Any]:
    """Test a method and put its record into results.json.

    With another `dataset`, on the test classes of that one, shown as the run's own are.
    """
    started, stages = time.monotonic(), needed(run.config, [method]) + ([method] if trains(method) else [])
    summaries = {name: stage_value(run.config, name).summary(run.folder.path) for name in stages}
    seconds = {spec_of(name).record: summaries[name]["seconds"] for name in stages}
    classes = run.foreign_classes(dataset) if dataset else None
    if trains(method):
        learners = [read_learner(run, method, rank) for rank in range(summaries[method]["kept"])]
        found, scores = _learner_results(run, learners, classes, tick)
        shape = run.benchmark
        temperature = learners[0].temperature(shape.ways, shape.support, shape.pool)
    else:
        temperature = _prototype_temperature(run)
        found, scores = _prototype_results(run, classes, temperature, tick), None
    seconds["test"] = round(time.monotonic() - started, 2)
    record = _record(run, method, dataset or run.config.dataset, found, seconds)
    if found.bins is not None:
        record["temperature"] = temperature
    if scores is not None:
        record["scores"] = _figures(run, scores)
    if method in summaries:
        own = summaries[method]
        record |= {name: own[name] for name in ("start", "validation", "best_step", "step_ms", "kept")}
    on_rank_zero(lambda: run.records.keep(record, found.per_task))
    if trains(method) and dataset is None and run.config.test.shapes:
        try_shapes(run, method, learners, tick)
    return record


def validate_method(run: Run, method: str, tick: Tick) -> Figure:
    """The accuracy of a method on meta-validation tasks of the benchmark's shape, the same for every method."""
    config = run.config
    tasks, batch_size, seed = config.train.validation_tasks, config.test.batch_size, config.seed
    if trains(method):
        learners = [
            read_learner(run, method, rank)
            for rank in range(stage_value(config, method).summary(run.folder.path)["kept"])
        ]
        source = run.source(learners[0], "val")
        replay = Replay("validation", run.device.type == "cuda" and source.on_device, run.observer.said)
        answer = learner_answers(learners, source, replay, tasks=config.engine.tasks)
        found = evaluate(answer, source.draw, tasks, batch_size, seed, "validation", run.measure, tick)
    else:
        answer, draw = _prototype_answers(run, run.splits["val"], "validation")
        found = evaluate(answer, draw, tasks, batch_size, seed, "validation", tick=tick)
    return over_tasks(run.measure, found.per_task)


test_method.__test__ = False  # type: ignore[attr-defined]  # not a test case, whatever a collector thinks of the name


def _prototype_temperature(run: Run) -> float:
    """The temperature of nearest class means, chosen on meta-validation tasks.

    Their logits are minus squared distances, whose scale is nobody's choice: probabilities need one.
    """
    config, (answer, draw) = run.config, _prototype_answers(run, run.splits["val"], "validation")
    tasks, batch_size = config.train.validation_tasks, config.test.batch_size
    return best_temperature(*all_answers(answer, draw, tasks, batch_size, config.seed, "validation"))


def _prototype_results(run: Run, classes: ClassSet | None, temperature: float, tick: Tick) -> Evaluation:
    """What nearest class means are worth in each task."""
    config, (answer, draw) = run.config, _prototype_answers(run, classes or run.splits["test"], "test")
    tested = config.test

    def tempered(logits: Tensor) -> Tensor:
        return logits / temperature

    return evaluate(
        answer, draw, tested.tasks, tested.batch_size, config.seed, "test", tick=tick, as_logits=tempered
    )


def _prototype_answers(run: Run, classes: ClassSet, what: str) -> tuple[Answer, Draw]:
    replay = Replay(what, run.device.type == "cuda", run.observer.said)
    return prototype_answers(pretrained_network(run), run.setup(), run.config.pretrain, classes, replay)


def _learner_results(
    run: Run, learners: list[Learner], classes: ClassSet | None, tick: Tick
) -> tuple[Evaluation, Evaluation | None]:
    """What the learner is worth in each task, and the scores that it is given, where it asks for them."""
    config, first = run.config, learners[0]
    source = run.source(first, "test") if classes is None else run.task_source(first, classes)
    replay = Replay("test", run.device.type == "cuda" and source.on_device, run.observer.said)
    scored, tested = first.scorer is not None, config.test

    def as_logits(predictions: Tensor) -> Tensor:
        return torch.stack([predictions[0].double(), score_logits(predictions[1])]) if scored else predictions

    found = evaluate(
        learner_answers(learners, source, replay, scored, config.engine.tasks),
        source.draw,
        tested.tasks,
        tested.batch_size,
        config.seed,
        "test",
        run.measure,
        tick,
        (2,) if scored else (),
        as_logits,
    )
    return (found.kind(0), found.kind(1)) if scored else (found, None)


def _record(
    run: Run, method: str, dataset: str, found: Evaluation, seconds: Mapping[str, float]
) -> dict[str, Any]:
    config = run.config
    return {
        "method": method,
        "protocol": config.protocol,
        "dataset": dataset,
        "backbone": config.learner.backbone,
        "ways": config.learner.ways,
        "shots": config.shots,
        "seed": config.seed,
        "tasks": len(found.per_task),
        **_figures(run, found),
        "seconds": seconds,
        "device": describe_device(run.device),
        "version": __version__,
    }


def _figures(run: Run, found: Evaluation) -> dict[str, float]:
    result, places = over_tasks(run.measure, found.per_task), 3 if run.measure is ACCURACY else 6
    figures = {run.measure.name: round(result.mean, places), "ci95": round(result.ci95, places)}
    if found.log_loss is not None and found.bins is not None:
        figures["nll"] = round(found.log_loss.mean().item(), 4)
        figures["ece"] = round(expected_calibration_error(found.bins).item(), 2)
    return figures
