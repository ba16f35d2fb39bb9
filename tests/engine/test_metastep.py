"""One meta-step of Algorithm 1: the gradient, its clipping, the step, and words for a step that fails."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import npbml.engine.metastep as metastep
from npbml.engine.execute import Executor
from npbml.engine.metastep import MetaStep, Tasks, diagnose, eager_meta_step
from npbml.engine.settings import EngineSettings
from npbml.engine.step import all_finite, apply_gradient
from npbml.errors import NotFiniteError, RunError
from npbml.learner.learner import Learner
from npbml.learner.prepare import Counts, Prepared, prepare_tasks
from npbml.tasks import Task, stack_tasks

MakeLearner = Callable[..., Learner]
MakeTask = Callable[..., Task]


def meta_gradient(
    learner: Learner, parameters: list[nn.Parameter], prepared: Prepared, labels: Tensor
) -> tuple[Tensor, list[Tensor]]:
    return Executor(learner).gradient(parameters, prepared, labels, learner.outer(1.0))


def meta_step(
    learner: Learner,
    optimizer: torch.optim.Optimizer,
    prepared: Prepared,
    labels: Tensor,
    clip: str = "none",
    clip_at: float = 10.0,
) -> float:
    step = MetaStep(learner, optimizer, EngineSettings(tasks="vmap"), clip, clip_at)
    return step(ready(prepared, labels), learner.outer(1.0))


def ready(prepared: Prepared, labels: Tensor) -> Tasks:
    return Tasks(lambda *given: given, (prepared, labels), None)


def prepared_tasks(learner: Learner, make_task: MakeTask, count: int = 2) -> tuple[Prepared, Tensor]:
    tasks = stack_tasks([make_task(seed) for seed in range(count)])
    return learner.prepare_batch(tasks), tasks.query_labels


def test_the_gradient_of_prepared_tasks_is_that_of_the_meta_loss(
    make_learner: MakeLearner, make_task: MakeTask
) -> None:
    learner = make_learner()
    parameters = [parameter for part in learner.groups().values() for parameter in part.values()]
    loss, gradients = meta_gradient(learner, parameters, *prepared_tasks(learner, make_task))
    expected_loss = learner.meta_loss([make_task(0), make_task(1)])
    expected = torch.autograd.grad(expected_loss, parameters)
    torch.testing.assert_close(loss, expected_loss.detach(), rtol=0, atol=1e-12)
    assert not loss.requires_grad
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_a_parameter_without_a_part_in_the_loss_has_gradient_zero(
    make_learner: MakeLearner, make_task: MakeTask
) -> None:
    learner = make_learner(head={"copy": "value"})
    _, gradients = meta_gradient(learner, [learner.head.weight], *prepared_tasks(learner, make_task))
    assert torch.equal(gradients[0], torch.zeros_like(learner.head.weight))


@pytest.mark.parametrize("clip", ["none", "value", "norm"])
def test_a_meta_step_is_the_optimisers_step_on_the_clipped_gradient(
    make_learner: MakeLearner, make_task: MakeTask, clip: str
) -> None:
    learner = make_learner()
    parameters = list(learner.parameters())
    before = [parameter.detach().clone() for parameter in parameters]
    work = prepared_tasks(learner, make_task)
    loss, gradients = meta_gradient(learner, parameters, *work)
    returned = meta_step(learner, torch.optim.SGD(parameters, lr=0.5), *work, clip, 0.02)
    assert returned == loss.item()
    length = torch.cat([g.flatten() for g in gradients]).norm()
    assert length > 0.02
    clipped = {
        "none": gradients,
        "value": [g.clamp(-0.02, 0.02) for g in gradients],
        "norm": [g * 0.02 / (length + 1e-6) for g in gradients],
    }[clip]
    for parameter, start, gradient in zip(parameters, before, clipped, strict=True):
        torch.testing.assert_close(parameter.detach(), start - 0.5 * gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("clip", ["none", "value", "norm"])
def test_a_meta_step_in_plain_torch_is_the_same_step(
    make_learner: MakeLearner, make_task: MakeTask, clip: str
) -> None:
    one, other = make_learner(), make_learner()
    mine = torch.optim.SGD(one.parameters(), lr=0.5)
    theirs = torch.optim.SGD(other.parameters(), lr=0.5)
    loss = eager_meta_step(one, mine, [make_task(0), make_task(1)], clip=clip, clip_at=0.02)
    expected = meta_step(other, theirs, *prepared_tasks(other, make_task), clip, 0.02)
    assert loss == pytest.approx(expected, abs=1e-12)
    for tensor, wanted in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(tensor, wanted, rtol=0, atol=1e-12)


def test_a_meta_step_in_plain_torch_refuses_what_is_not_finite(
    make_learner: MakeLearner, make_task: MakeTask
) -> None:
    learner = make_learner()
    spoil(learner.head.weight)
    with pytest.raises(NotFiniteError, match=r"the adapted tensor head\.weight after 0 inner steps"):
        eager_meta_step(learner, torch.optim.Adam(learner.parameters()), [make_task(0)])


def test_a_gradient_below_the_limit_is_not_changed() -> None:
    for clip in ("value", "norm"):
        parameter = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        gradient = torch.tensor([0.3, -0.4], dtype=torch.float64)
        apply_gradient(torch.optim.SGD([parameter], lr=1.0), [parameter], [gradient.clone()], clip, 10.0)
        torch.testing.assert_close(parameter.detach(), -gradient, rtol=0, atol=1e-14)


def test_meta_steps_lower_the_meta_loss(make_learner: MakeLearner, make_task: MakeTask) -> None:
    learner = make_learner()
    work = prepared_tasks(learner, make_task)
    optimizer = torch.optim.Adam(learner.parameters(), lr=0.01)
    losses = [meta_step(learner, optimizer, *work) for _ in range(8)]
    assert losses[-1] < 0.9 * losses[0]


def test_frozen_parts_survive_a_meta_step(make_learner: MakeLearner, make_task: MakeTask) -> None:
    learner = make_learner()
    before = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
    meta_step(learner, torch.optim.Adam(learner.parameters(), lr=0.01), *prepared_tasks(learner, make_task))
    learned = dict(learner.named_parameters())
    for name, tensor in learner.state_dict().items():
        assert torch.equal(tensor, before[name]) is (name not in learned)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_anything_not_finite_is_seen(bad: float) -> None:
    one = torch.ones(3)
    spoilt = torch.tensor([1.0, bad, 1.0])
    assert all_finite(torch.tensor(1.0), [one, one])
    assert not all_finite(torch.tensor(bad), [one])
    assert not all_finite(torch.tensor(1.0), [one, spoilt])


def spoil(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.view(-1)[0] = float("nan")


PLANTED: list[tuple[str, str, dict[str, Any]]] = [
    ("relation.score.weight", "the scores of the query items, in task 0", {}),
    ("relation.encoder.0.units.0.conv.weight", "the scores of the query items", {}),
    ("network.stem.blocks.0.unit.conv.weight", "the stem's features", {}),
    ("loss.inductive.layers.0.weight", "the inductive term of the inner loss at inner step 0", {}),
    ("loss.transductive.layers.2.bias", "the transductive term of the inner loss at inner step 0", {}),
    (
        "loss.regulariser.films.1.generator.weight",
        "the regulariser term of the inner loss at inner step 0",
        {},
    ),
    (
        "network.tail.blocks.0.unit.conv.weight",
        "the adapted tensor network.tail.blocks.0.unit.conv.weight after 0 inner steps",
        {},
    ),
    ("head.weight", "the adapted tensor head.weight after 0 inner steps", {}),
    ("network.tail.blocks.0.warp.omega", "the base term of the inner loss at inner step 0", {}),
    (
        "network.tail.blocks.0.warp.film.generator.bias",
        "the base term of the inner loss at inner step 0",
        {"film": {"conditioning": "batch", "refresh": "task"}},
    ),
]


@pytest.mark.parametrize(("name", "words", "changes"), PLANTED, ids=[case[0] for case in PLANTED])
def test_a_planted_nan_is_found_where_it_was_planted(
    make_learner: MakeLearner, make_task: MakeTask, name: str, words: str, changes: dict[str, Any]
) -> None:
    learner = make_learner(**changes)
    spoil(learner.state_dict()[name])
    optimizer = torch.optim.Adam(learner.parameters())
    before = {key: tensor.clone() for key, tensor in learner.named_parameters()}
    with pytest.raises(RunError) as error:
        meta_step(learner, optimizer, *prepared_tasks(learner, make_task))
    assert "NaN or infinity" in str(error.value) and f"it comes from {words}" in str(error.value)
    for key, tensor in learner.named_parameters():
        torch.testing.assert_close(tensor.detach(), before[key], rtol=0, atol=0, equal_nan=True)


def test_the_diagnosis_names_the_task_and_the_group(make_learner: MakeLearner, make_task: MakeTask) -> None:
    learner = make_learner()
    parameters = list(learner.groups()["omega"].values())
    tasks = [make_task(0), make_task(1)]
    tasks[1].support_images[0, 0, 0, 0] = float("inf")
    batch = stack_tasks(tasks)
    images = torch.cat([batch.support_images, batch.query_images], 1)  # as they come from a data set, unchecked
    counts = Counts.of_queries(batch.support_labels.shape[1], batch.query_labels.shape[1])
    prepared = prepare_tasks(learner, images, batch.support_labels, counts, 3)
    _, gradients = meta_gradient(learner, parameters, prepared, batch.query_labels)
    words = diagnose(learner, parameters, gradients, prepared)
    assert "in the meta-gradient of omega;" in words
    assert words.endswith("the stem's features, in task 1 of the batch")


def test_a_divergence_is_dated(make_learner: MakeLearner, make_task: MakeTask) -> None:
    """After one step of 1e200 theta is finite, but the products of logits in a modulated network are not."""
    one_step = make_learner(inner={"lr": 1e200, "steps": 1}).adapt(make_task(0))
    assert all(value.isfinite().all() for value in one_step.values())
    learner = make_learner(inner={"lr": 1e200, "steps": 3})
    with pytest.raises(RunError, match="the inductive term of the inner loss at inner step 1, in task 0"):
        meta_step(learner, torch.optim.Adam(learner.parameters()), *prepared_tasks(learner, make_task))


def test_a_finite_adaptation_points_at_the_second_derivative(
    make_learner: MakeLearner, make_task: MakeTask
) -> None:
    learner = make_learner()
    parameters = [learner.head.bias]
    prepared, _ = prepared_tasks(learner, make_task)
    words = diagnose(learner, parameters, [torch.tensor([float("nan")])], prepared)
    assert "in the meta-gradient of theta;" in words and "second derivative" in words


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler's own
@pytest.mark.parametrize("wrong", [(), (True,), (True, False)])
def test_compiled_code_is_used_only_where_it_finds_the_gradient(
    make_learner: MakeLearner, make_task: MakeTask, monkeypatch: pytest.MonkeyPatch, wrong: tuple[bool, ...]
) -> None:
    """`wrong` are the ways, by vmap or not, in which compiled code computes something else."""

    def factor(executor: Executor) -> float:
        return 2.0 if executor.compiled and executor.vmap in wrong else 1.0

    chosen, said = chosen_executor(make_learner(), make_task, monkeypatch, factor, "float32")
    assert chosen.compiled is (len(wrong) < 2)
    assert chosen.vmap is (len(wrong) != 1)
    assert ("not used: its meta-gradient is off by 100 %" in said[-1]) is (len(wrong) == 2)


@pytest.mark.parametrize("rounding", [0.0, 0.3])
def test_compiled_code_may_be_as_far_off_as_plain_code_of_its_rounding(
    make_learner: MakeLearner, make_task: MakeTask, monkeypatch: pytest.MonkeyPatch, rounding: float
) -> None:
    """TF32 moves the gradient by `rounding`, and compiled code by 0.4."""

    def factor(executor: Executor) -> float:
        rounded = torch.backends.cudnn.allow_tf32
        return 1.0 + (0.4 if executor.compiled else rounding) if rounded else 1.0

    chosen, _ = chosen_executor(make_learner(), make_task, monkeypatch, factor, "tf32")
    assert chosen.compiled is (rounding > 0)


def chosen_executor(
    learner: Learner,
    make_task: MakeTask,
    monkeypatch: pytest.MonkeyPatch,
    factor: Callable[[Executor], float],
    precision: Any,
) -> tuple[Executor, list[str]]:
    """The executor that a first meta-step chooses where each has its gradient times a factor; and what is said."""

    class Suspect(Executor):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given[:2], False, *given[3:5])  # the compiler itself is not what is tested
            self.compiled = given[2]

        def gradient(self, *given: Any) -> Any:
            loss, found = super().gradient(*given)
            return loss, [factor(self) * part for part in found]

    monkeypatch.setattr(metastep, "Executor", Suspect)
    said: list[str] = []
    optimizer = torch.optim.SGD(learner.parameters(), lr=0.0)
    settings = EngineSettings(tasks="vmap", compile="on", precision=precision)
    step = MetaStep(learner, optimizer, settings, say=said.append)
    prepared, labels = prepared_tasks(learner, make_task)
    step(ready(prepared, labels), learner.outer(1.0))
    assert step.executor is not None
    return step.executor, said
