"""Losses of pairs of an item and a class: law N1 of docs/laws.md, and what the networks see."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from npbml.errors import DataError
from npbml.learner.learner import Learner
from npbml.rule.pairs import pair_inputs
from npbml.tasks import Task

SYMMETRIC = {"inductive": False, "transductive": False, "symmetric_support": True, "symmetric_query": True}


def renamed(task: Task, order: torch.Tensor) -> Task:
    """The same task with class c called order[c]."""
    return task._replace(support_labels=order[task.support_labels], query_labels=order[task.query_labels])


@pytest.mark.parametrize(
    "loss", [{}, {"balanced": True}, {"score_weight": 0.5, "target": "soft"}, {"symmetric_support": False}]
)
@pytest.mark.parametrize("ways", [2, 3, 4, 7])
def test_n1_renaming_the_classes_renames_the_logits(
    make_learner: Callable[..., Learner], make_task: Callable[..., Task], ways: int, loss: dict[str, Any]
) -> None:
    learner = make_learner(loss={**SYMMETRIC, "hidden": 5, **loss}, size=16, net={"filters": 3})
    task = make_task(ways=ways, shots=1, queries=2, size=16)
    order = torch.randperm(ways, generator=torch.Generator().manual_seed(ways))
    logits, others = learner.predict(task), learner.predict(renamed(task, order))
    torch.testing.assert_close(others[:, order], logits, rtol=0, atol=1e-9)
    assert logits.std() > 1e-3  # it has something to say


def test_slots_for_classes_do_not_have_that_property(
    make_learner: Callable[..., Learner], make_task: Callable[..., Task]
) -> None:
    learner, task = make_learner(size=16, net={"filters": 3}), make_task(shots=1, queries=2, size=16)
    order = torch.tensor([1, 2, 0])
    difference = learner.predict(renamed(task, order))[:, order] - learner.predict(task)
    assert difference.abs().max() > 1e-6
    with pytest.raises(DataError, match="slot for each of 3 classes"):
        learner.predict(make_task(ways=4, size=16))


def test_the_head_vector_learns_through_the_mean_logit(
    make_learner: Callable[..., Learner], make_task: Callable[..., Task]
) -> None:
    """All inputs but the mean logit stay when the logits of an item move together (laws C19 and C20)."""
    learner = make_learner(loss={**SYMMETRIC, "regulariser": False, "hidden": 5}, size=16, net={"filters": 3})
    learner.meta_loss([make_task(shots=1, size=16)]).backward()
    assert learner.head.bias.grad is not None and learner.head.bias.grad.abs().max() > 1e-12


def test_what_the_networks_see() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]], dtype=torch.float64)
    target, loss = torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([0.7], dtype=torch.float64)
    seen = pair_inputs(logits, target, loss, balanced=True)[0, 1]
    p = logits.softmax(-1)[0]
    expected = [1.0, p[1].log(), p[1], 1.0, 0.7, -(p * p.log()).sum(), 1.0, 2.0, 3 * p[1]]
    torch.testing.assert_close(seen, torch.tensor(expected, dtype=torch.float64))


def test_tied_logits_share_the_gradient() -> None:
    logits = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    rival = pair_inputs(logits, torch.zeros(1, 4), torch.zeros(1))[0, 0, 6]
    (gradient,) = torch.autograd.grad(rival, logits)
    torch.testing.assert_close(gradient, torch.tensor([[1.0, -1 / 3, -1 / 3, -1 / 3]], dtype=torch.float64))
