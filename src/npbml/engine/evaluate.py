"""How good a learner is, over many tasks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from npbml.engine.capture import Replay
from npbml.engine.distributed import sum_over_ranks, world
from npbml.engine.execute import Executor
from npbml.engine.settings import Tasks
from npbml.engine.source import Source
from npbml.learner import Learner
from npbml.randomness import generator

DRAWN_TOGETHER = 50  # fixed, so that the tasks do not depend on how many are evaluated together


class Accuracy(NamedTuple):
    """Mean and half-width of the 95 % interval over tasks."""

    mean: float
    ci95: float


@dataclass(frozen=True)
class Measure:
    """What is measured of a task's predictions, and what is better."""

    name: str
    per_task: Callable[[Tensor, Tensor], Tensor]  # predictions [tasks, queries, outputs], labels -> [tasks]
    scale: float
    lower: bool
    form: str

    def better(self, one: float, other: float) -> bool:
        return one < other if self.lower else one > other

    def show(self, value: float) -> str:
        return self.form.format(value)

    def over(self, per_task: Tensor) -> Accuracy:
        """The mean over tasks, and 1.96 standard errors."""
        values = self.scale * per_task.double()
        return Accuracy(values.mean().item(), 1.96 * values.std().item() / len(values) ** 0.5)


ACCURACY = Measure(
    "accuracy", lambda logits, labels: (logits.argmax(-1) == labels).double().mean(-1), 100, False, "{:.2f} %"
)
ERROR = Measure(
    "squared error",
    lambda values, labels: (values.squeeze(-1) - labels).double().square().mean(-1),
    1,
    True,
    "{:.4f}",
)
MEASURES = {"classes": ACCURACY, "values": ERROR}


@torch.no_grad()
def evaluate(
    answer: Callable[[Tensor], tuple[Tensor, Tensor]],
    draw: Callable[[int, torch.Generator], Tensor],
    tasks: int,
    together: int,
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
    for start in range(0, tasks, DRAWN_TOGETHER):
        drawn = draw(DRAWN_TOGETHER, generator(seed, purpose, start))[: tasks - start]
        for indices in drawn.split(together):
            found = torch.zeros(*kinds, len(indices), dtype=torch.float64)
            if len(results) % size == rank:
                found = measure.per_task(*answer(indices)).cpu()
            results.append(found)
            tick(len(indices))
    return sum_over_ranks([torch.cat(results, -1)])[0]


Answer = Callable[[Tensor], tuple[Tensor, Tensor]]  # which tasks -> their query predictions and labels


def replayed(answer: Answer, replay: Replay | None) -> Answer:
    """The same answers, recorded where that is possible."""
    return answer if replay is None else lambda indices: replay(answer, (indices,))


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
    together = len(learners[0].network.tail.blocks) == 1 if tasks == "auto" else tasks == "together"
    members = [Executor(learner, together) for learner in learners]

    def answer(indices: Tensor) -> tuple[Tensor, Tensor]:
        prepared, labels = source.prepare(indices)
        logits = [member.logits(prepared) for member in members]
        mean = torch.stack(logits).mean(0)
        return torch.stack([mean, prepared.scores]) if scores else mean, labels

    return replayed(answer, replay)
