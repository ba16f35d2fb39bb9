"""Laws C14 to C16: the inner loop is SGD, and its meta-gradient is that of the unrolled steps."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from npbml.learner.learner import Learner
from npbml.randomness import generator
from npbml.rule.descend import Parameters, Precondition, begin, inner_step
from npbml.rule.objective import Outer
from npbml.rule.settings import InnerSettings
from npbml.tasks import Task


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed, "numbers"), dtype=torch.float64)


def descend(
    loss: Callable[[Parameters], Tensor], theta: Parameters, settings: InnerSettings, order: int = 2
) -> Parameters:
    """theta_J of plain SGD."""
    state = begin(theta, settings)
    for step in range(settings.steps):
        state = inner_step(lambda t, _: loss(t), state, settings, plain(settings.lr), torch.empty(0), step, order)
    return state.theta


def plain(lr: float) -> Precondition:
    """P = alpha I"""
    return lambda direction, point: {name: lr * d for name, d in direction.items()}


def sgd_settings(steps: int, lr: float, momentum: float, nesterov: bool, decay: float) -> InnerSettings:
    return InnerSettings(steps=steps, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=decay)


def arbitrary_loss(theta: Parameters) -> Tensor:
    """Neither convex nor separable."""
    a, b = theta["a"], theta["b"]
    return (a @ b).sin().sum() + (a.exp() * 0.1).sum() + (b.square().sum() + 1).sqrt() + a.mean() * b.sum()


def quadratic(curvature: Tensor, centre: Tensor) -> Callable[[Parameters], Tensor]:
    """(theta - c)^T H (theta - c) / 2"""
    return lambda theta: 0.5 * (theta["x"] - centre) @ curvature @ (theta["x"] - centre)


def positive(size: int, seed: int) -> Tensor:
    root = numbers(size, size, seed=seed)
    return root @ root.T / size + 0.1 * torch.eye(size, dtype=torch.float64)


@pytest.mark.parametrize(
    ("momentum", "nesterov", "decay", "order"),
    [
        case
        for case in itertools.product((0.0, 0.7), (False, True), (0.0, 0.03), (1, 2))
        if case[0] > 0 or not case[1]
    ],
)
def test_c14_descend_is_torch_sgd(momentum: float, nesterov: bool, decay: float, order: int) -> None:
    start = {"a": numbers(3, 4), "b": numbers(4, seed=1)}
    mine = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
    torchs = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
    sgd = torch.optim.SGD(torchs.values(), 0.1, momentum, weight_decay=decay, nesterov=nesterov)
    for steps in range(1, 6):
        sgd.zero_grad()
        arbitrary_loss(torchs).backward()
        sgd.step()
        settings = sgd_settings(steps, 0.1, momentum, nesterov, decay)
        for name, tensor in descend(arbitrary_loss, mine, settings, order).items():
            torch.testing.assert_close(tensor, torchs[name], rtol=1e-12, atol=1e-12)


def test_c14_descend_leaves_its_start_alone() -> None:
    start = {"a": numbers(3, 4), "b": numbers(4, seed=1)}
    before = {name: tensor.clone() for name, tensor in start.items()}
    descend(arbitrary_loss, start, InnerSettings())
    assert all(torch.equal(start[name], before[name]) for name in before)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_c15_quadratic_losses_have_a_closed_form(steps: int) -> None:
    """theta_J = c + (I - aH)^J (theta_0 - c), dL_Q/dtheta_0 = (I - aH)^J H_Q (theta_J - c_Q)"""
    curvature, centre = positive(5, 2), numbers(5, seed=3)
    query_curvature, query_centre = positive(5, 4), numbers(5, seed=5)
    start, rate = numbers(5, seed=6).requires_grad_(), 0.07
    settings = sgd_settings(steps, rate, 0.0, False, 0.0)
    adapted = descend(quadratic(curvature, centre), {"x": start}, settings)
    loss = quadratic(query_curvature, query_centre)(adapted)
    (gradient,) = torch.autograd.grad(loss, start)

    contraction = torch.linalg.matrix_power(torch.eye(5, dtype=torch.float64) - rate * curvature, steps)
    expected = centre + contraction @ (start.detach() - centre)
    torch.testing.assert_close(adapted["x"].detach(), expected, rtol=0, atol=1e-12)
    expected_gradient = contraction @ query_curvature @ (expected - query_centre)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-12)


def both_orders(inner: Callable[[Parameters], Tensor], decay: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """The meta-gradient of order 1, that of order 2, and the query gradient at theta_J."""
    query, start = quadratic(positive(5, 4), numbers(5, seed=5)), numbers(5, seed=6).requires_grad_()
    gradients = []
    for order in (1, 2):
        adapted = descend(inner, {"x": start}, sgd_settings(3, 0.1, 0.9, True, decay), order)
        gradients.append(torch.autograd.grad(query(adapted), start)[0])
    end = adapted["x"].detach().requires_grad_()
    return *gradients, torch.autograd.grad(query({"x": end}), end)[0]


def test_c16_first_order_is_the_query_gradient_at_the_end() -> None:
    first, second, at_end = both_orders(quadratic(positive(5, 2), numbers(5, seed=3)))
    torch.testing.assert_close(first, at_end, rtol=0, atol=1e-12)
    assert (first - second).abs().max() > 1e-2


def test_c16_orders_agree_where_the_inner_loss_is_linear() -> None:
    slope = numbers(5, seed=7)
    first, second, at_end = both_orders(lambda theta: slope @ theta["x"])
    torch.testing.assert_close(first, at_end, rtol=0, atol=1e-12)
    torch.testing.assert_close(first, second, rtol=0, atol=1e-12)


def test_c16_first_order_keeps_the_shrinkage_of_weight_decay() -> None:
    """Decay acts on theta itself, not through a gradient: order 1 sees theta_J = r theta_0 + const."""
    settings = sgd_settings(3, 0.1, 0.9, True, 0.5)
    one = {"x": torch.ones((), dtype=torch.float64)}
    shrinkage = descend(lambda theta: 0 * theta["x"], one, settings)["x"]
    first, _, at_end = both_orders(quadratic(positive(5, 2), numbers(5, seed=3)), decay=0.5)
    assert shrinkage < 0.9
    torch.testing.assert_close(first, shrinkage * at_end, rtol=0, atol=1e-12)


def test_c16_first_order_learner_has_the_query_gradient_and_teaches_the_loss_nothing(
    make_learner: Callable[..., Learner],
    make_task: Callable[..., Task],
) -> None:
    learner, task = make_learner(inner={"weight_decay": 0.0}), make_task()
    prepared = learner.prepare(task)
    # Settings of a learned loss refuse order 1, which would teach it nothing: here it is asked for directly.
    names, parameters = zip(*learner.named_parameters(), strict=True)
    loss = learner.task_loss(prepared, task.query_labels, Outer(1, {-1: 1.0}))
    found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    gradient = dict(zip(names, found, strict=True))
    adapted = {name: value.detach().requires_grad_() for name, value in learner.adapt(task).items()}
    logits = learner._forward(adapted, prepared.final, None)
    loss = torch.nn.functional.cross_entropy(logits, task.query_labels)
    at_end = dict(zip(adapted, torch.autograd.grad(loss, list(adapted.values())), strict=True))

    conv = "network.tail.blocks.0.unit.conv.weight"
    torch.testing.assert_close(gradient[conv], at_end[conv], rtol=0, atol=1e-12)
    # Every class starts as a copy of one vector, whose gradient is the sum of theirs.
    torch.testing.assert_close(gradient["head.weight"][0], at_end["head.weight"].sum(0), rtol=0, atol=1e-12)
    assert all(gradient[name].abs().max() == 0 for name in learner.groups()["phi"])
    assert all(gradient[name].abs().max() > 0 for name in learner.groups()["omega"])
