"""How good a learner is, over many tasks."""

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from npbml.engine.capture import Replay
from npbml.engine.distributed import sum_over_ranks, world
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


@torch.no_grad()
def evaluate(
    answer: Callable[[Tensor], tuple[Tensor, Tensor]],
    draw: Callable[[int, torch.Generator], Tensor],
    tasks: int,
    batch_size: int,
    seed: int,
    purpose: str,
    measure: Measure = ACCURACY,
    tick: Callable[[int], None] = lambda count: None,
    kinds: tuple[int, ...] = (),
) -> Tensor:
    """The measure of each of `tasks` tasks, [*kinds, tasks]; an accuracy in 0..1.

    `draw` gives the images of tasks and `answer` their query logits, perhaps of several `kinds`, and labels. The
    tasks are fixed by `seed` and `purpose`; more of them begin with the same ones. Ranks answer in turn, and all
    have every result.
    """
    rank, size = world()
    results: list[Tensor] = []
    for start in range(0, tasks, DRAWN_AT_ONCE):
        drawn = draw(DRAWN_AT_ONCE, generator(seed, purpose, start))[: tasks - start]
        for indices in drawn.split(batch_size):
            found = torch.zeros(*kinds, len(indices), dtype=torch.float64)
            if len(results) % size == rank:
                found = PER_TASK[measure.name](*answer(indices)).cpu()
            results.append(found)
            tick(len(indices))
    return sum_over_ranks([torch.cat(results, -1)])[0]


Answer = Callable[[Tensor], tuple[Tensor, Tensor]]  # which tasks -> their query predictions and labels


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
        return torch.stack([mean, prepared.scores]) if scores else mean, labels

    return replayed(answer, replay, (source.key, scores, len(members)))
