"""Tasks of any shape: laws N1 to N3 of docs/laws.md for `npbml-any`, and that no inner loop diverges."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from npbml.learner.learner import Learner
from npbml.methods import find_recipe
from npbml.randomness import generator
from npbml.tasks import Task

MakeLearner, MakeTask = Callable[..., Learner], Callable[..., Task]
CASES = [(2, 1, 0), (2, 3, 1), (3, 1, 4), (5, 2, 9), (7, 1, 0)]  # ways, shots, unlabelled items


@pytest.fixture
def any_learner(make_learner: MakeLearner) -> Callable[..., Learner]:
    def make(method: str = "npbml-any", **changes: Any) -> Learner:
        tables = {name: dict(table) if isinstance(table, dict) else table for name, table in rule(method).items()}
        tables["loss"] = {**tables.get("loss", {}), "hidden": 5}
        tables["net"] = {**tables["net"], "filters": 6}
        for name, table in changes.items():
            tables[name] = {**tables.get(name, {}), **table} if isinstance(table, dict) else table
        return make_learner(size=16, **tables)

    return make


def rule(method: str) -> dict[str, Any]:
    return dict(find_recipe(method).rule)


@pytest.fixture
def pooled(make_task: MakeTask) -> Callable[..., Task]:
    """A task with a pool of its own, whose support differs in number between classes."""

    def make(ways: int = 3, shots: int = 1, pool: int = 4, seed: int = 0) -> Task:
        task = make_task(seed=seed, ways=ways, shots=shots, queries=2, size=16)
        extra = make_task(seed=seed + 1, ways=ways, shots=1, queries=4, size=16)
        support = torch.cat([task.support_images, extra.support_images[:1]])
        labels = torch.cat([task.support_labels, extra.support_labels[:1]])
        unlabelled = extra.query_images[torch.randperm(4 * ways, generator=generator(seed, "pool"))[:pool]]
        return Task(support, labels, task.query_images, task.query_labels, unlabelled)

    return make


@pytest.mark.parametrize(("ways", "shots", "pool"), CASES)
@pytest.mark.parametrize("method", ["npbml-any", "maml-any"])
def test_n1_renaming_the_classes_renames_the_answers(
    any_learner: Callable[..., Learner],
    pooled: Callable[..., Task],
    method: str,
    ways: int,
    shots: int,
    pool: int,
) -> None:
    learner, task = any_learner(method), pooled(ways, shots, pool)
    order = torch.randperm(ways, generator=generator(ways, "order"))
    shuffled = torch.randperm(len(task.support_labels), generator=generator(ways, "items"))
    renamed = task._replace(
        support_images=task.support_images[shuffled],
        support_labels=order[task.support_labels][shuffled],
        query_labels=order[task.query_labels],
    )
    logits, others = learner.predict(task), learner.predict(renamed)
    torch.testing.assert_close(others[:, order], logits, rtol=0, atol=1e-9)
    assert logits.std() > 1e-4


@pytest.mark.parametrize(("ways", "shots", "pool"), CASES)
def test_n2_the_answer_to_a_query_does_not_depend_on_other_queries(
    any_learner: Callable[..., Learner], pooled: Callable[..., Task], ways: int, shots: int, pool: int
) -> None:
    learner, task = any_learner(), pooled(ways, shots, pool)
    together = learner.predict(task)
    order = torch.randperm(len(task.query_labels), generator=generator(0, "queries"))
    permuted = learner.predict(task._replace(query_images=task.query_images[order]))
    torch.testing.assert_close(permuted, together[order], rtol=0, atol=1e-12)
    for number in range(len(task.query_labels)):
        alone = slice(number, number + 1)
        single = task._replace(query_images=task.query_images[alone], query_labels=task.query_labels[alone])
        torch.testing.assert_close(learner.predict(single), together[alone], rtol=0, atol=1e-12)


def test_the_pool_matters_and_its_order_does_not(
    any_learner: Callable[..., Learner], pooled: Callable[..., Task]
) -> None:
    learner, task = any_learner(), pooled(pool=6)
    logits = learner.predict(task)
    turned = task._replace(unlabelled_images=task.unlabelled_images.flip(0))  # type: ignore[union-attr]
    torch.testing.assert_close(learner.predict(turned), logits, rtol=0, atol=1e-9)
    none = task._replace(unlabelled_images=task.unlabelled_images[:0])  # type: ignore[index]
    assert (learner.predict(none) - logits).abs().max() > 1e-4


def test_n3_without_a_pool_and_a_learned_rule_it_is_maml(
    any_learner: Callable[..., Learner], pooled: Callable[..., Task]
) -> None:
    inner = {"lr": 0.05}
    learner, maml = any_learner(inner=inner), any_learner("maml-any", warp={"kind": "none"}, inner=inner)
    with torch.no_grad():
        for name, parameter in learner.named_parameters():
            if "film" in name or name.startswith(("loss.", "scorer.")) or name.endswith("warp.bias"):
                parameter.zero_()
            elif name.endswith("omega"):
                torch.nn.init.dirac_(parameter)
    own = learner.state_dict()
    maml.load_state_dict({name: own[name] for name in maml.state_dict()})
    task = pooled(pool=0)
    theta, expected = learner.adapt(task), maml.adapt(task)
    assert theta.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(theta[name], tensor, rtol=0, atol=1e-12)
    torch.testing.assert_close(learner.predict(task), maml.predict(task), rtol=0, atol=1e-12)


def test_a_pool_of_the_queries_is_the_default(
    any_learner: Callable[..., Learner], pooled: Callable[..., Task]
) -> None:
    learner, task = any_learner(), pooled()
    without = task._replace(unlabelled_images=None)
    given = task._replace(unlabelled_images=task.query_images)
    torch.testing.assert_close(learner.predict(without), learner.predict(given), rtol=0, atol=1e-12)


def test_a_shorter_step_is_left_as_it_is(any_learner: Callable[..., Learner], pooled: Callable[..., Task]) -> None:
    """A bound that is never reached changes no bit."""
    task = pooled()
    free, bound = (any_learner(inner={"max_step": length}).predict(task) for length in (None, 1e6))
    assert torch.equal(free, bound)


@pytest.mark.parametrize("lr", [1e2, 1e8, 1e30])
@pytest.mark.parametrize("method", ["npbml-any", "maml-any"])
def test_no_inner_loop_diverges(
    any_learner: Callable[..., Learner], pooled: Callable[..., Task], method: str, lr: float
) -> None:
    learner, task = any_learner(method, inner={"lr": lr, "steps": 5}).float(), pooled()
    moved = sum((tensor - start).square().sum() for tensor, start in _ends(learner, task))
    assert moved.sqrt() <= 5 * 3.0 + 1e-3
    logits = learner.predict(task)
    assert logits.isfinite().all() and logits.softmax(-1).isfinite().all()


def _ends(learner: Learner, task: Task) -> list[tuple[Tensor, Tensor]]:
    start, end = learner.start(3), learner.adapt(task)
    return [(end[name], start[name]) for name in start]


def test_the_meta_gradient_of_a_bounded_loop_is_finite(
    any_learner: Callable[..., Learner], pooled: Callable[..., Task]
) -> None:
    learner = any_learner(inner={"lr": 1e3, "steps": 5})
    learner.meta_loss([pooled(), pooled(seed=5)]).backward()
    for name, parameter in learner.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name
