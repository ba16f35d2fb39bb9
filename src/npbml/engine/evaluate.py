"""How good a learner is, over many tasks."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from npbml.engine.calibration import BINS, confidence_bins, log_loss
from npbml.engine.capture import Replay
from npbml.engine.distributed import gather, sum_over_ranks, world
from npbml.engine.execute import Executor
from npbml.engine.settings import Tasks
from npbml.engine.source import Source
from npbml.learner.learner import Learner
from npbml.measures import ACCURACY, Figure, Measure
from npbml.randomness import generator

DRAWN_AT_ONCE = 50  # fixed, so that the tasks do not depend on the batch size of evaluation


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """The share of right predictions in each task: [tasks, queries, ways] and [tasks, queries] -> [tasks]"""
    return (logits.argmax(-1) == labels).double().mean(-1)


def squared_error(values: Tensor, labels: Tensor) -> Tensor:
    """The mean squared error of each task: [tasks, queries, 1] and [tasks, queries] -> [tasks]"""
    return (values.squeeze(-1) - labels).double().square().mean(-1)


PER_TASK: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"accuracy": accuracy, "squared error": squared_error}


def over_tasks(measure: Measure, per_task: Tensor) -> Figure:
    """The mean over tasks in the measure's unit, and 1.96 standard errors."""
    values = measure.scale * per_task.double()
    return Figure(values.mean().item(), 1.96 * values.std().item() / len(values) ** 0.5)


class Evaluation(NamedTuple):
    """What is found of predictions over many tasks; of values, which have no probabilities, the measure alone."""

    per_task: Tensor
    """The measure of each task, [*kinds, tasks]; an accuracy in 0..1."""
    log_loss: Tensor | None = None
    """The negative log-likelihood of each task, the mean over its queries, [*kinds, tasks]."""
    bins: Tensor | None = None
    """All queries of all tasks by confidence, [*kinds, 15, 3]: see `confidence_bins`."""

    def kind(self, index: int) -> "Evaluation":
        """That of one kind of predictions."""
        log_loss, bins = (None if part is None else part[index] for part in self[1:])
        return Evaluation(self.per_task[index], log_loss, bins)


Answer = Callable[[Tensor], tuple[Tensor, Tensor]]  # which tasks -> their query predictions and labels
Draw = Callable[[int, torch.Generator], Tensor]  # how many tasks -> which tasks


@torch.no_grad()
def evaluate(
    answer: Answer,
    draw: Draw,
    tasks: int,
    batch_size: int,
    seed: int,
    purpose: str,
    measure: Measure = ACCURACY,
    tick: Callable[[int], None] = lambda count: None,
    kinds: tuple[int, ...] = (),
    as_logits: Callable[[Tensor], Tensor] = lambda predictions: predictions,
) -> Evaluation:
    """The measure of each of `tasks` tasks and, of classes, how good the probabilities are.

    `draw` gives the images of tasks and `answer` their query logits, perhaps of several `kinds`, and labels. The
    tasks are fixed by `seed` and `purpose`; more of them begin with the same ones. Ranks answer in turn, and all
    have every result. Where predictions are no logits, or are to have a temperature, `as_logits` makes of them
    those whose softmax is judged; accuracy is that of the predictions as they are.
    """
    rank, size = world()
    classes = measure.name == ACCURACY.name
    rows: list[Tensor] = []  # of each task: the measure, the log loss, the bins
    for number, indices in _batches(draw, tasks, batch_size, seed, purpose):
        row = torch.zeros(*kinds, len(indices), 2 + 3 * BINS if classes else 1, dtype=torch.float64)
        if number % size == rank:
            predictions, labels = answer(indices)
            row[..., 0] = PER_TASK[measure.name](predictions, labels).cpu()
            if classes:
                logits, labels = as_logits(predictions).cpu(), labels.cpu()
                row[..., 1] = log_loss(logits, labels)
                row[..., 2:] = confidence_bins(logits, labels).flatten(-2)
        rows.append(row)
        tick(len(indices))
    (found,) = sum_over_ranks([torch.cat(rows, -2)])
    per_task = found[..., 0].contiguous()
    if not classes:
        return Evaluation(per_task)
    return Evaluation(per_task, found[..., 1].contiguous(), found[..., 2:].sum(-2).unflatten(-1, (BINS, 3)))


@torch.no_grad()
def all_answers(
    answer: Answer, draw: Draw, tasks: int, batch_size: int, seed: int, purpose: str
) -> tuple[Tensor, Tensor]:
    """The predictions [tasks, queries, ...] and labels [tasks, queries] of the tasks that `evaluate` is about.

    Ranks answer in turn, and all have every answer, on the CPU.
    """
    rank, size = world()
    mine: list[tuple[int, Tensor, Tensor]] = []
    for number, indices in _batches(draw, tasks, batch_size, seed, purpose):
        if number % size == rank:
            predictions, labels = (part.cpu().clone() for part in answer(indices))  # a recording overwrites them
            mine.append((number, predictions, labels))
    found = sorted(gather(mine), key=lambda part: part[0])
    return torch.cat([part[1] for part in found]), torch.cat([part[2] for part in found])


def _batches(draw: Draw, tasks: int, batch_size: int, seed: int, purpose: str) -> Iterator[tuple[int, Tensor]]:
    """The number of each batch of tasks, and which these are."""
    number = 0
    for start in range(0, tasks, DRAWN_AT_ONCE):
        drawn = draw(DRAWN_AT_ONCE, generator(seed, purpose, start))[: tasks - start]
        for indices in drawn.split(batch_size):
            yield number, indices
            number += 1


def replayed(answer: Answer, replay: Replay | None, key: Hashable) -> Answer:
    """The same answers, recorded where that is possible; `key` says what they depend on beside the tasks."""
    return answer if replay is None else lambda indices: replay(answer, (indices,), key)


def learner_answers(
    learners: Learner | Sequence[Learner],
    source: Source,
    replay: Replay | None = None,
    scores: bool = False,
    tasks: Tasks = "auto",
) -> Answer:
    """Query logits of a learner that adapts to each task; of several, which share all that is frozen, the mean.

    With `scores`, those that it is given of the query items stand beside them, as a second kind. `tasks` says how
    those of a batch run.
    """
    learners = [learners] if isinstance(learners, Learner) else learners
    # vmap makes grouped convolutions of those by weights of each task. They are slow where several blocks adapt:
    # on two cores a task of MAML takes 83 ms in place of 57; one of NPBML, whose last block adapts, 31 for 48.
    vmap = len(learners[0].network.tail.blocks) == 1 if tasks == "auto" else tasks == "vmap"
    members = [Executor(learner, vmap) for learner in learners]

    def answer(indices: Tensor) -> tuple[Tensor, Tensor]:
        prepared, labels = source.prepare(indices)
        logits = [member.logits(prepared) for member in members]
        mean = torch.stack(logits).mean(0)
        return torch.stack([mean, members[0].scores(prepared)]) if scores else mean, labels

    return replayed(answer, replay, (source.key, scores, len(members)))
