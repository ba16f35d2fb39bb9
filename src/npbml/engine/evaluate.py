"""Accuracy over many tasks."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from npbml.engine.source import TaskSource
from npbml.learner import Learner
from npbml.randomness import generator

DRAWN_TOGETHER = 50  # fixed, so that the tasks do not depend on how many are evaluated together


class Accuracy(NamedTuple):
    """Mean and half-width of the 95 % interval over tasks, in percent."""

    mean: float
    ci95: float


def accuracy(per_task: Tensor) -> Accuracy:
    """1.96 standard errors over the accuracies [tasks], each in 0..1."""
    percent = 100 * per_task.double()
    return Accuracy(percent.mean().item(), 1.96 * percent.std().item() / len(percent) ** 0.5)


@torch.no_grad()
def evaluate(
    answer: Callable[[Tensor], tuple[Tensor, Tensor]],
    draw: Callable[[int, torch.Generator], Tensor],
    tasks: int,
    together: int,
    seed: int,
    purpose: str,
    tick: Callable[[int], None] = lambda count: None,
) -> Tensor:
    """Accuracy of each of `tasks` tasks, [tasks].

    `draw` gives the images of tasks and `answer` their query logits and labels. The tasks are fixed by `seed`
    and `purpose`; more of them begin with the same ones.
    """
    results: list[Tensor] = []
    for start in range(0, tasks, DRAWN_TOGETHER):
        drawn = draw(DRAWN_TOGETHER, generator(seed, purpose, start))[: tasks - start]
        for indices in drawn.split(together):
            logits, labels = answer(indices)
            results.append((logits.argmax(-1) == labels).double().mean(-1).cpu())
            tick(len(indices))
    return torch.cat(results)


def learner_answers(learner: Learner, source: TaskSource) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Query logits of a learner that adapts to each task."""

    def answer(indices: Tensor) -> tuple[Tensor, Tensor]:
        prepared, labels = source.prepare(indices)
        return learner.over_tasks(learner.logits)(prepared), labels

    return answer
