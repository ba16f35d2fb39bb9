"""Law C31: accuracy with its interval, over tasks that the seed and the purpose fix."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from npbml.data.tasks import ClassSet
from npbml.engine import evaluate as evaluation
from npbml.engine.calibration import confidence_bins, log_loss
from npbml.engine.evaluate import (
    PER_TASK,
    accuracy,
    all_answers,
    evaluate,
    learner_answers,
    over_tasks,
    squared_error,
)
from npbml.engine.settings import Tasks
from npbml.engine.source import TaskSource
from npbml.learner.learner import Learner
from npbml.measures import ACCURACY, ERROR
from npbml.shapes import benchmark_shape


@given(st.lists(st.floats(0, 1), min_size=2, max_size=50))
def test_c31_the_interval_is_1_96_standard_errors(values: list[float]) -> None:
    found = over_tasks(ACCURACY, torch.tensor(values, dtype=torch.float64))
    percent = 100 * np.array(values)
    assert found.mean == pytest.approx(percent.mean(), abs=1e-10)
    assert found.ci95 == pytest.approx(1.96 * percent.std(ddof=1) / len(values) ** 0.5, abs=1e-10)


def test_c31_a_known_case() -> None:
    found = over_tasks(ACCURACY, torch.tensor([0.5, 0.7, 0.9]))
    assert found.mean == pytest.approx(70.0, abs=1e-4)
    assert found.ci95 == pytest.approx(1.96 * 20 / 3**0.5, abs=1e-4)


def draw(tasks: int, random: torch.Generator) -> Tensor:
    return torch.randint(0, 1000, (tasks, 2, 3), generator=random)


def answer(indices: Tensor) -> tuple[Tensor, Tensor]:
    """Two classes and four queries a task; right where a number is even."""
    right = indices.flatten(1)[:, :4] % 2 == 0
    return torch.stack([right, ~right], -1).double(), torch.zeros(len(indices), 4, dtype=torch.long)


def recording(seen: list[Tensor]) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """`answer`, keeping what it was asked."""

    def answer_and_keep(indices: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(indices)
        return answer(indices)

    return answer_and_keep


def test_an_accuracy_is_the_share_of_right_answers_of_its_task() -> None:
    seen: list[Tensor] = []
    found = evaluate(recording(seen), draw, 7, 3, 0, "test")
    indices = torch.cat(seen)
    assert [len(part) for part in seen] == [3, 3, 1]
    assert torch.equal(found.per_task, (indices.flatten(1)[:, :4] % 2 == 0).double().mean(1))


def test_calibration_is_that_of_all_queries_of_all_tasks() -> None:
    found = evaluate(answer, draw, 7, 3, 0, "test")
    logits, labels = all_answers(answer, draw, 7, 3, 0, "test")
    assert logits.shape == (7, 4, 2) and torch.equal(found.per_task, accuracy(logits, labels))
    assert found.log_loss is not None and found.bins is not None
    assert torch.equal(found.log_loss, log_loss(logits, labels))
    torch.testing.assert_close(found.bins, confidence_bins(logits, labels).sum(0), rtol=0, atol=1e-12)
    assert found.bins.shape == (15, 3) and found.bins[:, 0].sum() == 7 * 4
    halved = evaluate(answer, draw, 7, 3, 0, "test", as_logits=lambda logits: logits / 2)
    assert halved.log_loss is not None and torch.equal(halved.per_task, found.per_task)
    assert torch.equal(halved.log_loss, log_loss(logits / 2, labels))


def test_values_have_no_probabilities() -> None:
    def values(indices: Tensor) -> tuple[Tensor, Tensor]:
        logits, labels = answer(indices)
        return logits[..., :1], labels.double()

    found = evaluate(values, draw, 7, 3, 0, "test", ERROR)
    assert found.per_task.shape == (7,) and found.log_loss is None and found.bins is None


def test_two_kinds_of_answers_are_measured_apart() -> None:
    def both(indices: Tensor) -> tuple[Tensor, Tensor]:
        logits, labels = answer(indices)
        return torch.stack([logits, -logits]), labels

    found = evaluate(both, draw, 7, 3, 0, "test", kinds=(2,))
    right = evaluate(answer, draw, 7, 3, 0, "test")
    assert torch.equal(found.per_task, torch.stack([right.per_task, 1 - right.per_task]))
    assert found.bins is not None and found.bins.shape == (2, 15, 3)
    for part, own in zip(found.kind(0), right, strict=True):
        assert part is not None and own is not None and torch.equal(part, own)


def test_more_tasks_begin_with_the_same_ones_whatever_the_batch_size() -> None:
    long = evaluate(answer, draw, 130, 7, 3, "test")
    assert long.per_task.shape == (130,) and long.log_loss is not None
    for tasks, batch_size in ((130, 50), (60, 1), (50, 100), (3, 2)):
        found = evaluate(answer, draw, tasks, batch_size, 3, "test")
        assert torch.equal(found.per_task, long.per_task[:tasks])
        assert found.log_loss is not None and torch.equal(found.log_loss, long.log_loss[:tasks])
        if tasks == 130:
            assert found.bins is not None and long.bins is not None and torch.equal(found.bins, long.bins)
    assert not torch.equal(evaluate(answer, draw, 130, 7, 4, "test").per_task, long.per_task)
    assert not torch.equal(evaluate(answer, draw, 130, 7, 3, "validation").per_task, long.per_task)


def test_ticks_count_the_tasks() -> None:
    ticks: list[int] = []
    evaluate(answer, draw, 55, 20, 0, "test", tick=ticks.append)
    assert sum(ticks) == 55


@pytest.mark.parametrize("tasks", ["auto", "vmap", "loop"])
def test_a_learners_answers_are_its_predictions(
    make_learner: Callable[..., Learner], classes: ClassSet, tasks: Tasks
) -> None:
    learner = make_learner()
    source = TaskSource(learner, classes, benchmark_shape(learner.settings.ways, 2, 2))
    found = evaluate(learner_answers(learner, source, tasks=tasks), source.draw, 4, 3, 0, "test")
    indices: list[Tensor] = []
    evaluate(recording(indices), source.draw, 4, 3, 0, "test")
    batch = classes.task(torch.cat(indices), 2, classes.pixels)
    for index in range(4):
        task = batch.map(lambda part, i=index: part[i])
        expected = (learner.predict(task).argmax(-1) == task.query_labels).double().mean()
        assert found.per_task[index] == expected


@pytest.mark.parametrize(
    ("tasks", "frozen", "vmap"),
    [("auto", 3, True), ("auto", 2, False), ("vmap", 0, True), ("loop", 3, False)],
)
def test_tasks_run_in_one_vmap_where_one_block_adapts_or_as_is_said(
    make_learner: Callable[..., Learner],
    classes: ClassSet,
    monkeypatch: pytest.MonkeyPatch,
    tasks: Tasks,
    frozen: int,
    vmap: bool,
) -> None:
    made = []
    monkeypatch.setattr(evaluation, "Executor", lambda learner, vmap: made.append(vmap))
    learner = make_learner(net={"frozen_blocks": frozen})
    learner_answers(
        [learner, learner], TaskSource(learner, classes, benchmark_shape(learner.settings.ways, 2, 2)), tasks=tasks
    )
    assert made == [vmap, vmap]


def test_an_error_is_the_mean_square_of_its_task_and_less_is_better() -> None:
    values, labels = torch.tensor([[[1.0], [2.0]], [[0.0], [0.0]]]), torch.tensor([[1.0, 4.0], [0.5, 0.5]])
    per_task = squared_error(values, labels)
    assert per_task.tolist() == [2.0, 0.25]
    assert over_tasks(ERROR, per_task).mean == 1.125 and ERROR.show(1.125) == "1.1250"
    assert ERROR.better(0.1, 0.2) and not ERROR.better(0.2, 0.2)
    assert ACCURACY.better(0.2, 0.1) and not ACCURACY.better(0.2, 0.2) and ACCURACY.show(81.256) == "81.26 %"
    assert PER_TASK[ERROR.name] is squared_error and PER_TASK[ACCURACY.name] is accuracy


def test_c31_an_ensemble_is_the_mean_of_logits_then_the_highest(
    make_learner: Callable[..., Learner], classes: ClassSet
) -> None:
    one, other = make_learner(), make_learner()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.7)
    source = TaskSource(one, classes, benchmark_shape(one.settings.ways, 2, 2))
    indices: list[Tensor] = []
    evaluate(recording(indices), source.draw, 3, 3, 0, "test")
    logits, labels = learner_answers([one, other], source)(indices[0])
    alone = [learner_answers(member, source)(indices[0])[0] for member in (one, other)]
    assert (alone[0] - alone[1]).abs().max() > 1e-3
    torch.testing.assert_close(logits, (alone[0] + alone[1]) / 2, rtol=0, atol=1e-14)
    assert labels.shape == (3, 6)
