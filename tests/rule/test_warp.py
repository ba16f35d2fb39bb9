"""Laws C6 and C26: a fixed linear map in the forward pass preconditions the gradient."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from npbml.data.tasks import Task
from npbml.learner import Learner
from npbml.nets.layers import set_norm
from npbml.randomness import generator
from npbml.rule.descend import InnerSettings, descend
from npbml.rule.warp import Warp

RATE = 0.1
STEP = InnerSettings(1, RATE, 0.0, False, 0.0)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed, "numbers"), dtype=torch.float64)


def random_warp(channels: int, kernel: int) -> Warp:
    warp = Warp(channels, kernel, norm=False).double()
    with torch.no_grad():
        warp.omega.copy_(numbers(*warp.omega.shape, seed=9))
    return warp


def measure(y: Tensor) -> Tensor:
    """An arbitrary smooth loss of an output."""
    return (y.sin() + 0.3 * y.square() * y.tanh()).sum()


def test_c6_a_linear_warp_after_theta_multiplies_the_step_by_t_t_transposed() -> None:
    """T (W - a g_W) = T W - a T T^t g_A, where A = T W"""
    x, w, t = numbers(7, 4), numbers(3, 4, seed=1), numbers(5, 3, seed=2)
    stepped = descend(lambda theta: measure(x @ (t @ theta["w"]).T), {"w": w}, STEP)["w"]
    composed = torch.func.grad(lambda a: measure(x @ a.T))(t @ w)
    torch.testing.assert_close(t @ stepped, t @ w - RATE * t @ t.T @ composed, rtol=0, atol=1e-10)


def test_c6_a_linear_warp_before_theta_multiplies_the_step_from_the_right() -> None:
    """(W - a g_W) T = W T - a g_A T^t T, where A = W T"""
    x, w, t = numbers(7, 4), numbers(5, 3, seed=1), numbers(3, 4, seed=2)
    stepped = descend(lambda theta: measure(x @ (theta["w"] @ t).T), {"w": w}, STEP)["w"]
    composed = torch.func.grad(lambda a: measure(x @ a.T))(w @ t)
    torch.testing.assert_close(stepped @ t, w @ t - RATE * composed @ t.T @ t, rtol=0, atol=1e-10)


def test_c6_the_warp_unit_of_kernel_1_preconditions_the_channels() -> None:
    """conv(x, W) through the unit is one convolution with T W, whose step is T T^t times its gradient."""
    warp, x, kernel = random_warp(3, 1), numbers(2, 4, 5, 5), numbers(3, 4, 3, 3, seed=1)
    t = warp.omega.detach()[:, :, 0, 0]
    compose = "dc,cijk->dijk"
    stepped = descend(lambda theta: measure(warp(F.conv2d(x, theta["w"], padding=1))), {"w": kernel}, STEP)
    composed = torch.einsum(compose, t, kernel)
    gradient = torch.func.grad(lambda a: measure(F.conv2d(x, a, padding=1)))(composed)
    expected = composed - RATE * torch.einsum(compose, t @ t.T, gradient)
    torch.testing.assert_close(torch.einsum(compose, t, stepped["w"]), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kernel", [1, 3])
def test_c6_the_warp_unit_moves_its_output_by_o_o_transposed(kernel: int) -> None:
    """With O the unit's matrix on whole maps, a step on its input u moves O u by -a O O^t times its gradient."""
    warp, u = random_warp(2, kernel), numbers(1, 2, 4, 4)
    o = torch.func.jacrev(lambda v: warp(v.view(1, 2, 4, 4)).flatten())(u.flatten()).detach()
    stepped = descend(lambda theta: measure(warp(theta["u"])), {"u": u}, STEP)["u"]
    gradient = torch.func.grad(measure)(o @ u.flatten())
    expected = o @ u.flatten() - RATE * o @ o.T @ gradient
    torch.testing.assert_close(warp(stepped).flatten().detach(), expected, rtol=0, atol=1e-10)


def test_c6_omega_stays_fixed_inside_a_task(
    make_learner: Callable[..., Learner], make_task: Callable[..., Task]
) -> None:
    learner = make_learner()
    assert not any("omega" in name for name in learner.adapt(make_task()))


@pytest.mark.parametrize("kernel", [1, 3])
def test_c26_a_dirac_warp_is_the_identity(kernel: int) -> None:
    u = numbers(2, 3, 5, 5)
    assert torch.equal(Warp(3, kernel, norm=False).double()(u), u)


def test_c26_dirac_with_batch_norm_standardises_instead() -> None:
    u, warp = 2 + 3 * numbers(4, 3, 5, 5), Warp(3).double()
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
    embeddings = learner.network(make_task().query_images).detach()
    torch.testing.assert_close(embeddings.mean(0), torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-12)
    without = make_learner(shaken=False, film={"enabled": False}, warp={"norm": False})
    assert without.network(make_task().query_images).mean(0).abs().max() > 1e-2
