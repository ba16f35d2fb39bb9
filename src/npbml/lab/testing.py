"""The test of a method on meta-test tasks, and its record."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from npbml.data.tasks import ClassSet
from npbml.engine.capture import Replay
from npbml.engine.device import describe_device
from npbml.engine.distributed import on_rank_zero
from npbml.engine.evaluate import evaluate, learner_answers, over_tasks
from npbml.lab.run import Run
from npbml.lab.stages import needed, spec_of, stage_value
from npbml.lab.weights import pretrained_network, read_learner
from npbml.learner.learner import Learner
from npbml.measures import ACCURACY
from npbml.methods import trains
from npbml.stages.pretrain import prototype_accuracies
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
        per_task, scores = _learner_results(run, learners, classes, tick)
    else:
        per_task, scores = _prototype_results(run, classes, tick), None
    seconds["test"] = round(time.monotonic() - started, 2)
    record = _record(run, method, dataset or run.config.dataset, per_task, seconds)
    if scores is not None:
        record["scores"] = _figures(run, scores)
    if method in summaries:
        own = summaries[method]
        record |= {name: own[name] for name in ("start", "validation", "best_step", "step_ms", "kept")}
    on_rank_zero(lambda: run.records.keep(record, per_task))
    return record


test_method.__test__ = False  # type: ignore[attr-defined]  # not a test case, whatever a collector thinks of the name


def _prototype_results(run: Run, classes: ClassSet | None, tick: Tick) -> Tensor:
    """The accuracy of nearest class means in each task."""
    config, replay = run.config, Replay("test", run.device.type == "cuda", run.observer.said)
    classes, network = classes or run.splits["test"], pretrained_network(run)
    return prototype_accuracies(
        network, run.setup(), config.pretrain, classes, config.test.tasks, "test", replay, tick
    )


def _learner_results(
    run: Run, learners: list[Learner], classes: ClassSet | None, tick: Tick
) -> tuple[Tensor, Tensor | None]:
    """The measure of each task, and that of the scores which the learner is given, where it asks for them."""
    config, first = run.config, learners[0]
    source = run.source(first, "test") if classes is None else run.task_source(first, classes)
    replay = Replay("test", run.device.type == "cuda" and source.on_device, run.observer.said)
    scored, tested = first.scorer is not None, config.test
    per_task = evaluate(
        learner_answers(learners, source, replay, scored, config.engine.tasks),
        source.draw,
        tested.tasks,
        tested.batch_size,
        config.seed,
        "test",
        run.measure,
        tick,
        (2,) if scored else (),
    )
    return (per_task[0], per_task[1]) if scored else (per_task, None)


def _record(run: Run, method: str, dataset: str, per_task: Tensor, seconds: Mapping[str, float]) -> dict[str, Any]:
    config = run.config
    return {
        "method": method,
        "protocol": config.protocol,
        "dataset": dataset,
        "backbone": config.learner.backbone,
        "ways": config.learner.ways,
        "shots": config.shots,
        "seed": config.seed,
        "tasks": len(per_task),
        **_figures(run, per_task),
        "seconds": seconds,
        "device": describe_device(run.device),
        "version": __version__,
    }


def _figures(run: Run, per_task: Tensor) -> dict[str, float]:
    result, places = over_tasks(run.measure, per_task), 3 if run.measure is ACCURACY else 6
    return {run.measure.name: round(result.mean, places), "ci95": round(result.ci95, places)}
