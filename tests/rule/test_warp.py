"""Laws C6, C7 and C26: a fixed map in the forward pass preconditions the gradient."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from npbml.learner.learner import Learner
from npbml.learner.prepare import normalised
from npbml.nets.layers import ConvUnit, set_norm
from npbml.randomness import generator
from npbml.rule.descend import Parameters, begin, inner_step
from npbml.rule.settings import InnerSettings, WarpSettings
from npbml.rule.warp import Warp
from npbml.tasks import Task

RATE = 0.1


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed, "numbers"), dtype=torch.float64)


def make_warp(channels: int, **changes: Any) -> Warp:
    return Warp(channels, WarpSettings(**({"norm": False} | changes))).double()


def random_warp(channels: int, **changes: Any) -> Warp:
    warp = make_warp(channels, **changes)
    with torch.no_grad():
        for seed, parameter in enumerate(warp.parameters()):
            parameter.copy_(numbers(*parameter.shape, seed=9 + seed))
    return warp


def stepped_by(loss: Callable[[Parameters], Tensor], theta: Parameters) -> Parameters:
    """theta after one step of plain gradient descent."""
    settings = InnerSettings(momentum=0.0, nesterov=False, weight_decay=0.0)

    def plain(direction: Parameters, point: object) -> Parameters:
        return {name: RATE * d for name, d in direction.items()}

    state = begin(theta, settings)
    return inner_step(lambda t, step: loss(t), state, settings, plain, torch.empty(0), 0).theta


def measure(y: Tensor) -> Tensor:
    """An arbitrary smooth loss of an output."""
    return (y.sin() + 0.3 * y.square() * y.tanh()).sum()


def test_c6_a_linear_warp_after_theta_multiplies_the_step_by_t_t_transposed() -> None:
    """T (W - a g_W) = T W - a T T^t g_A, where A = T W"""
    x, w, t = numbers(7, 4), numbers(3, 4, seed=1), numbers(5, 3, seed=2)
    stepped = stepped_by(lambda theta: measure(x @ (t @ theta["w"]).T), {"w": w})["w"]
    composed = torch.func.grad(lambda a: measure(x @ a.T))(t @ w)
    torch.testing.assert_close(t @ stepped, t @ w - RATE * t @ t.T @ composed, rtol=0, atol=1e-10)


def test_c6_a_linear_warp_before_theta_multiplies_the_step_from_the_right() -> None:
    """(W - a g_W) T = W T - a g_A T^t T, where A = W T"""
    x, w, t = numbers(7, 4), numbers(5, 3, seed=1), numbers(3, 4, seed=2)
    stepped = stepped_by(lambda theta: measure(x @ (theta["w"] @ t).T), {"w": w})["w"]
    composed = torch.func.grad(lambda a: measure(x @ a.T))(w @ t)
    torch.testing.assert_close(stepped @ t, w @ t - RATE * composed @ t.T @ t, rtol=0, atol=1e-10)


def test_c6_the_warp_unit_of_kernel_1_preconditions_the_channels() -> None:
    """conv(x, W) through the unit is one convolution with T W, whose step is T T^t times its gradient."""
    warp, x, kernel = random_warp(3, kernel=1), numbers(2, 4, 5, 5), numbers(3, 4, 3, 3, seed=1)
    t = warp.omega.detach()[:, :, 0, 0]
    compose = "dc,cijk->dijk"
    stepped = stepped_by(lambda theta: measure(warp(F.conv2d(x, theta["w"], padding=1))), {"w": kernel})
    composed = torch.einsum(compose, t, kernel)
    gradient = torch.func.grad(lambda a: measure(F.conv2d(x, a, padding=1)))(composed)
    expected = composed - RATE * torch.einsum(compose, t @ t.T, gradient)
    torch.testing.assert_close(torch.einsum(compose, t, stepped["w"]), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kernel", [1, 3])
def test_c6_the_warp_unit_moves_its_output_by_o_o_transposed(kernel: int) -> None:
    """With O the unit's matrix on whole maps, a step on its input u moves O u by -a O O^t times its gradient."""
    warp, u = random_warp(2, kernel=kernel), numbers(1, 2, 4, 4)
    o = torch.func.jacrev(lambda v: warp(v.view(1, 2, 4, 4)).flatten())(u.flatten()).detach()
    stepped = stepped_by(lambda theta: measure(warp(theta["u"])), {"u": u})["u"]
    gradient = torch.func.grad(measure)(o @ u.flatten())
    expected = o @ u.flatten() - RATE * o @ o.T @ gradient
    torch.testing.assert_close(warp(stepped).flatten().detach(), expected, rtol=0, atol=1e-10)


def test_c6_a_warp_before_the_norm_preconditions_kernel_and_bias_over_the_channels() -> None:
    """T-Net: norm(T (W x + b)) steps as norm(A x + a) with A = T W, a = T b and T T^t before their gradients."""
    unit = ConvUnit(4, 3, warp=partial(Warp, settings=WarpSettings(kernel=1, norm=False)), bias=True).double()
    set_norm(unit, "running")  # a norm of the batch would hide the bias
    with torch.no_grad():
        unit.warp.omega.copy_(numbers(3, 3, 1, 1, seed=9))
        unit.norm.running_var.copy_(numbers(3, seed=8).exp())
    t, x = unit.warp.omega.detach()[:, :, 0, 0], numbers(2, 4, 5, 5)
    theta = {"conv.weight": numbers(3, 4, 3, 3, seed=1), "conv.bias": numbers(3, seed=2)}
    stepped = stepped_by(lambda theta: measure(functional_call(unit, theta, (x,))), theta)
    over = "dc,c...->d..."
    composed = {name: torch.einsum(over, t, value) for name, value in theta.items()}

    def composite_loss(a: dict[str, Tensor]) -> Tensor:
        return measure(unit.norm(F.conv2d(x, a["conv.weight"], a["conv.bias"], padding=1)))

    gradient = torch.func.grad(composite_loss)(composed)
    for name, value in composed.items():
        expected = value - RATE * torch.einsum(over, t @ t.T, gradient[name])
        torch.testing.assert_close(torch.einsum(over, t, stepped[name]), expected, rtol=0, atol=1e-10)
        assert (expected - value).abs().max() > 1e-3


def test_c7_a_linear_warp_is_a_kronecker_preconditioner_of_the_composed_kernel() -> None:
    """vec A' = vec A - a (T T^t kron I kron I) vec g_A: Meta-Curvature with Mo = T T^t and Mi = Mf = I"""
    warp, x, w = random_warp(3, kernel=1), numbers(2, 4, 5, 5), numbers(3, 4, 3, 3, seed=1)
    t = warp.omega.detach()[:, :, 0, 0]
    stepped = stepped_by(lambda theta: measure(warp(F.conv2d(x, theta["w"], padding=1))), {"w": w})
    a, moved = (torch.einsum("dc,cijk->dijk", t, kernel) for kernel in (w, stepped["w"]))
    gradient = torch.func.grad(lambda a: measure(F.conv2d(x, a, padding=1)))(a)
    identities = torch.eye(4, dtype=torch.float64), torch.eye(9, dtype=torch.float64)
    precondition = torch.kron(torch.kron(t @ t.T, identities[0]), identities[1])
    expected = a.flatten() - RATE * precondition @ gradient.flatten()
    torch.testing.assert_close(moved.flatten(), expected, rtol=0, atol=1e-10)


NONLINEAR: list[dict[str, Any]] = [
    {"activation": "relu", "bias": True},
    {"activation": "relu", "bias": True, "norm": True},
]


@pytest.mark.parametrize("changes", NONLINEAR)
def test_a_non_linear_warp_preconditions_by_its_derivative_which_depends_on_the_data(
    changes: dict[str, Any],
) -> None:
    """A small step on u moves Omega(u) by -a D D^t times its gradient, D = dOmega at u."""
    warp, rate = random_warp(2, **changes), 1e-6
    derivatives = []
    for seed in (0, 1):
        u = numbers(1, 2, 4, 4, seed=seed)
        d = torch.func.jacrev(lambda v: warp(v.view(1, 2, 4, 4)).flatten())(u.flatten()).detach()
        before = warp(u).detach()
        gradient = torch.func.grad(measure)(before).flatten()
        stepped = u - rate * torch.func.grad(lambda v: measure(warp(v)))(u)
        moved = ((warp(stepped) - before).flatten() / rate).detach()
        torch.testing.assert_close(moved, -d @ d.T @ gradient, rtol=1e-3, atol=1e-3)
        derivatives.append(d)
    assert (derivatives[0] - derivatives[1]).abs().max() > 0.1


def test_a_linear_warp_has_one_derivative_for_all_data() -> None:
    warp = random_warp(2, bias=True)
    one, other = (
        torch.func.jacrev(lambda v: warp(v.view(1, 2, 4, 4)).flatten())(numbers(32, seed=seed)) for seed in (0, 1)
    )
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_c6_omega_stays_fixed_inside_a_task(
    make_learner: Callable[..., Learner], make_task: Callable[..., Task]
) -> None:
    learner = make_learner()
    assert not any("omega" in name for name in learner.adapt(make_task()))


@pytest.mark.parametrize("kernel", [1, 3])
def test_c26_a_dirac_warp_is_the_identity(kernel: int) -> None:
    u = numbers(2, 3, 5, 5)
    assert torch.equal(make_warp(3, kernel=kernel)(u), u)


def test_c26_dirac_with_batch_norm_standardises_instead() -> None:
    u, warp = 2 + 3 * numbers(4, 3, 5, 5), make_warp(3, norm=True)
    set_norm(warp, "batch")
    y = warp(u).detach()
    torch.testing.assert_close(y.mean((0, 2, 3)), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        y.var((0, 2, 3), correction=0), torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-4
    )
    assert (y - u).abs().max() > 1


def test_c26_embeddings_behind_a_normalised_warp_have_zero_batch_mean(
    make_learner: Callable[..., Learner], make_task: Callable[..., Task]
) -> None:
    learner = make_learner(shaken=False, film={"enabled": False})
    images = normalised(learner, make_task().query_images)
    embeddings = learner.network(images).detach()
    torch.testing.assert_close(embeddings.mean(0), torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-12)
    without = make_learner(shaken=False, film={"enabled": False}, warp={"norm": False})
    assert without.network(images).mean(0).abs().max() > 1e-2


def standard(u: Tensor) -> Tensor:
    return F.batch_norm(u, None, None, training=True)


def test_the_unit_is_its_equation() -> None:
    """norm(relu(omega u + b))"""
    warp = random_warp(3, bias=True, activation="relu", norm=True)
    u, (omega, bias) = 2 + 3 * numbers(4, 3, 5, 5), (warp.omega, warp.bias)
    scale, shift = (value[:, None, None] for value in (warp.norm.weight, warp.norm.bias))
    y = F.conv2d(u, omega, bias, padding=1).relu()
    torch.testing.assert_close(warp(u), standard(y) * scale + shift, rtol=0, atol=1e-12)


@pytest.mark.parametrize("activation", ["none", "relu"])
@pytest.mark.parametrize("kernel", [1, 3])
def test_a_warp_of_zeros_can_leave_them(kernel: int, activation: str) -> None:
    """A relu without slope at zero would keep its omega at zero for ever."""
    warp, u = make_warp(3, kernel=kernel, activation=activation, bias=True), 2 + 3 * numbers(4, 3, 5, 5)
    torch.nn.init.zeros_(warp.omega)
    assert not warp(u).any()
    gradients = torch.autograd.grad(measure(warp(u)), (warp.omega, warp.bias))
    assert all(gradient.abs().max() > 1e-2 for gradient in gradients)


def test_a_relu_warp_starts_as_the_identity_behind_a_relu_and_nowhere_else() -> None:
    u, warp = numbers(4, 3, 5, 5), make_warp(3, activation="relu")
    assert torch.equal(warp(u.relu()), u.relu())
    assert torch.equal(warp(u), u.relu()) and not torch.equal(warp(u), u)


def test_a_norm_standardises_what_the_start_would_leave() -> None:
    u, warp = 2 + 3 * numbers(4, 3, 5, 5), make_warp(3, norm=True)
    torch.testing.assert_close(warp(u), standard(u), rtol=0, atol=1e-12)
    set_norm(warp, "running")
    torch.testing.assert_close(warp(u), u / (1 + 1e-5) ** 0.5, rtol=0, atol=1e-12)
