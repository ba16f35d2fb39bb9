"""Law C30, for every way to execute tasks: all give the meta-gradient, and the predictions, of the plain loop."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from npbml.engine.execute import Executor, can_run_stepwise
from npbml.lab.protocols import preset
from npbml.lab.schema import method_config, override
from npbml.learner.learner import Learner
from npbml.learner.prepare import Prepared
from npbml.learner.settings import ImageSpec
from npbml.methods import BUILT_IN
from npbml.nets import layers
from npbml.rule import precondition
from npbml.tasks import Task, split_batch, stack_tasks

SMALL: dict[str, Any] = {
    "ways": 3,
    "net": {"filters": 3},
    "loss": {"hidden": 6},
    "scorer": {"widths": [2], "pools": 1},
    "inner": {"steps": 3},
    "init": {"std": 0.3},
}
Result = tuple[Tensor, list[Tensor]]


def learner_of(method: str, **changes: Any) -> Learner:
    config = override(override(preset("common", "fc100"), SMALL), changes)
    return Learner(method_config(config, method).learner, ImageSpec(2, 32, (0.5,) * 2, (0.25,) * 2)).double()


@pytest.fixture(autouse=True)
def small_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """ModGrad's networks in the size of the rest."""
    monkeypatch.setattr(precondition, "CONTEXT", 4)
    monkeypatch.setattr(precondition, "MIXTURE", 2)


@pytest.fixture
def tasks(make_task: Callable[..., Task]) -> Task:
    return stack_tasks([make_task(seed, shots=1) for seed in range(3)])


def gradient(learner: Learner, tasks: Task, progress: float = 0.02, **how: Any) -> Result:
    prepared: Prepared = learner.prepare_batch(tasks)
    executor = Executor(learner, **how)
    return executor.gradient(list(learner.parameters()), prepared, tasks.query_labels, learner.outer(progress))


def assert_same(one: Result, other: Result, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(one[0], other[0], rtol=1e-12, atol=1e-12)
    mine, theirs = (torch.cat([g.flatten() for g in result[1]]) for result in (one, other))
    assert theirs.norm() > 1e-3
    assert (mine - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("method", BUILT_IN)
def test_every_way_gives_the_gradient_of_the_loop(method: str, tasks: Task) -> None:
    learner = learner_of(method)
    loop = gradient(learner, tasks, vmap=False)
    for how in (
        {},
        {"chunk": 2},
        {"remat": True},
        {"remat": True, "vmap": False},
        {"remat": True, "chunk": 2},
    ):
        assert_same(gradient(learner, tasks, **how), loop)


@pytest.mark.parametrize("method", BUILT_IN)
@pytest.mark.parametrize("vmap", [True, False])
def test_every_way_gives_the_predictions_of_the_loop(method: str, vmap: bool, tasks: Task) -> None:
    learner = learner_of(method)
    found = Executor(learner, vmap).logits(learner.prepare_batch(tasks))
    loop = [learner.predict(task) for task in split_batch(tasks)]
    torch.testing.assert_close(found, torch.stack(loop), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", ["maml", "maml++", "gap"])
def test_batch_norm_behind_the_pooling_gives_the_same_gradient(
    method: str, tasks: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = learner_of(method, net={"frozen_blocks": 0})
    before = gradient(learner, tasks, vmap=False)
    monkeypatch.setattr(layers, "LARGE_MAP", 0)
    for how in ({"vmap": False}, {}, {"remat": True}):
        assert_same(gradient(learner, tasks, **how), before)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler's own
@pytest.mark.parametrize(
    ("method", "vmap"), [("npbml", True), ("npbml", False), ("maml++", True), ("npbml-quirks", True)]
)
def test_a_compiled_step_gives_the_gradient_of_the_loop(method: str, vmap: bool, tasks: Task) -> None:
    """Traced and differentiated ahead of time as for a GPU, with the branches for compiled code, but not fused.

    More than once, since code that keeps a value of its first call fails in the second.
    """
    learner = learner_of(method, inner={"steps": 2})
    loop = gradient(learner, tasks, vmap=False)
    torch.compiler.reset()
    executor = Executor(learner, vmap, compiled=True, backend="aot_eager")
    work = list(learner.parameters()), learner.prepare_batch(tasks), tasks.query_labels, learner.outer(0.02)
    for _ in range(2):
        assert_same(executor.gradient(*work), loop)
    torch.compiler.reset()


@pytest.mark.parametrize(
    "changes", [{"outer": {"objective": "trajectory"}}, {"film": {"conditioning": "batch", "refresh": "task"}}]
)
def test_what_cannot_be_taken_step_by_step_is_computed_whole(changes: dict[str, Any], tasks: Task) -> None:
    learner = learner_of("npbml", **changes)
    assert not can_run_stepwise(learner)
    assert_same(gradient(learner, tasks, remat=True), gradient(learner, tasks, vmap=False))


def test_half_precision_is_of_the_features_and_close(tasks: Task) -> None:
    """The tail computes in the precision of its features; gradients, head and losses keep the parameters'."""
    learner = learner_of("npbml").float()
    prepared = learner.prepare_batch(tasks.map(lambda p: p.float() if p.is_floating_point() else p))
    half = prepared._replace(inner=prepared.inner.bfloat16(), final=prepared.final.bfloat16())
    parameters, outer = list(learner.parameters()), learner.outer(1.0)
    results = [
        Executor(learner).gradient(parameters, work, tasks.query_labels, outer) for work in (prepared, half)
    ]
    assert all(g.dtype == torch.float32 for g in results[1][1]) and results[1][0].dtype == torch.float32
    full, rough = (torch.cat([g.flatten() for g in found]) for _, found in results)
    assert 1e-6 < (full - rough).norm() / full.norm() < 0.2


def test_a_truncated_unroll_is_of_first_order_before_its_last_steps(tasks: Task) -> None:
    second, first = learner_of("maml"), learner_of("maml", outer={"order": 1})
    results = {k: gradient(learner_of("maml", outer={"second_order_steps": k}), tasks) for k in (1, 2, 3, 5)}
    assert_same(results[3], gradient(second, tasks))
    assert_same(results[5], gradient(second, tasks))
    whole = torch.cat([g.flatten() for g in gradient(second, tasks)[1]])
    plain = torch.cat([g.flatten() for g in gradient(first, tasks)[1]])
    gaps = [(torch.cat([g.flatten() for g in results[k][1]]) - whole).norm().item() for k in (1, 2)]
    assert 0 < gaps[1] < gaps[0] < (plain - whole).norm().item()


def test_tasks_side_by_side_do_not_disturb_each_other(tasks: Task) -> None:
    """On two threads, again and again: each has the learner's parameters in modules of its own."""
    learner = learner_of("npbml")
    before = {name: parameter for name, parameter in learner.named_parameters()}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = gradient(learner, tasks, vmap=False)
    try:
        torch.set_num_threads(2)
        for _ in range(5):
            assert_same(gradient(learner, tasks, vmap=False), alone, 1e-13)
    finally:
        torch.set_num_threads(threads)
    assert all(parameter is before[name] for name, parameter in learner.named_parameters())


def test_a_learner_for_single_tasks_has_the_same_parameters_in_other_modules() -> None:
    learner = learner_of("boil", net={"affine": "inner"})
    other = learner.for_single_tasks()
    assert all(a is b for a, b in zip(learner.parameters(), other.parameters(), strict=True))
    assert all(a is b for a, b in zip(learner.buffers(), other.buffers(), strict=True))
    assert not set(learner.modules()) & set(other.modules())
    assert learner.vmapped and not other.vmapped


def test_features_with_channels_last_give_the_same_gradient(tasks: Task) -> None:
    learner = learner_of("npbml")
    prepared, outer, parameters = learner.prepare_batch(tasks), learner.outer(1.0), list(learner.parameters())
    inner, final = (x.movedim(2, -1).contiguous().movedim(-1, 2) for x in (prepared.inner, prepared.final))
    executor = Executor(learner, vmap=False)
    usual = executor.gradient(parameters, prepared, tasks.query_labels, outer)
    other = executor.gradient(parameters, prepared._replace(inner=inner, final=final), tasks.query_labels, outer)
    assert_same(other, usual)
