"""One learner, many threads: the answers of one thread, and weights that no call changes."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from npbml.learner.learner import Learner
from npbml.tasks import Task

THREADS, CALLS = 8, 200
RULES = {
    "npbml": {},
    "kept modulations": {"film": {"conditioning": "batch", "refresh": "task"}},
    "norms for each step": {"net": {"affine": "meta", "per_step_norm": True}},
}


@pytest.mark.parametrize("rule", RULES)
def test_predictions_from_threads_are_those_of_one(
    rule: str, make_learner: Callable[..., Learner], make_task: Callable[..., Task]
) -> None:
    learner = make_learner(
        size=16, net={"filters": 2, **RULES[rule].get("net", {})}, film=RULES[rule].get("film", {})
    )
    tasks = [make_task(seed=seed, shots=1, queries=1, size=16) for seed in range(4)]
    alone = [learner.predict(task).detach() for task in tasks]
    before = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
    objects = {name: id(tensor) for name, tensor in learner.named_parameters()}

    def call(number: int) -> bool:
        return torch.equal(learner.predict(tasks[number % 4]).detach(), alone[number % 4])

    with ThreadPoolExecutor(THREADS) as pool:
        assert all(pool.map(call, range(THREADS * CALLS)))
    after = learner.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert objects == {name: id(tensor) for name, tensor in learner.named_parameters()}


def test_adapt_and_meta_loss_from_threads(
    make_learner: Callable[..., Learner], make_task: Callable[..., Task]
) -> None:
    learner = make_learner(size=16, net={"filters": 2}, outer={"objective": "final"})
    task = make_task(shots=1, queries=1, size=16)
    theta, loss = learner.adapt(task), learner.meta_loss([task, task]).detach()

    def call(number: int) -> bool:
        if number % 2:
            return torch.equal(learner.meta_loss([task, task]).detach(), loss)
        return all(torch.equal(tensor, theta[name]) for name, tensor in learner.adapt(task).items())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(40)))
