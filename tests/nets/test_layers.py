"""Laws C25, and that nobody has to guess a layer's mode."""

from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from npbml.nets.layers import ConvUnit, Norm, ResidualBlock, freeze, initialise, set_norm
from npbml.randomness import generator


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed, "numbers"), dtype=torch.float64)


def make_norm(mode: Literal["track", "batch", "running"]) -> tuple[Norm, Tensor]:
    norm = Norm(3).double()
    norm.mode = mode
    with torch.no_grad():
        for tensor, seed in ((norm.weight, 1), (norm.bias, 2), (norm.running_mean, 3)):
            tensor.copy_(numbers(3, seed=seed))
        norm.running_var.copy_(numbers(3, seed=4).exp())
    return norm, 1 + 2 * numbers(4, 3, 5, 5)


def normalised(norm: Norm, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    y = (x - mean[:, None, None]) / (var[:, None, None] + 1e-5).sqrt()
    return y * norm.weight[:, None, None] + norm.bias[:, None, None]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", ["track", "batch"])
def test_a_norm_of_the_batch_uses_its_statistics_whatever_train_and_eval_say(
    mode: Literal["track", "batch"], training: bool
) -> None:
    norm, x = make_norm(mode)
    norm.train(training)
    expected = normalised(norm, x, x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0))
    torch.testing.assert_close(norm(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("training", [True, False])
def test_a_running_norm_uses_the_averages_whatever_train_and_eval_say(training: bool) -> None:
    norm, x = make_norm("running")
    norm.train(training)
    expected = normalised(norm, x, norm.running_mean, norm.running_var)
    torch.testing.assert_close(norm(x), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(norm(x)[:1], norm(x[:1]), rtol=0, atol=1e-12)


def test_only_a_tracking_norm_changes_its_averages() -> None:
    for mode in ("batch", "running"):
        norm, x = make_norm(mode)
        before = norm.running_mean.clone(), norm.running_var.clone()
        norm(x)
        assert torch.equal(norm.running_mean, before[0]) and torch.equal(norm.running_var, before[1])
    norm, x = make_norm("track")
    mean, var = norm.running_mean.clone(), norm.running_var.clone()
    norm(x)
    expected = 0.9 * mean + 0.1 * x.mean((0, 2, 3)), 0.9 * var + 0.1 * x.var((0, 2, 3))
    torch.testing.assert_close(norm.running_mean, expected[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(norm.running_var, expected[1], rtol=0, atol=1e-12)


def test_set_norm_reaches_every_norm_below_and_none_beside() -> None:
    parts = nn.ModuleList([ResidualBlock(2, 3, torch.relu), ConvUnit(2, 3)])
    set_norm(parts[0], "running")
    modes = [[part.mode for part in side.modules() if isinstance(part, Norm)] for side in parts]
    assert modes == [["running"] * 4, ["batch"]]


def test_c25_a_kernel_before_a_batch_norm_has_no_scale() -> None:
    """Scaling W leaves the output alone, so that W is orthogonal to its gradient, channel by channel."""
    unit, x = ConvUnit(2, 3).double(), numbers(4, 2, 6, 6)
    unit.norm.eps = 1e-30
    with torch.no_grad():
        unit.conv.weight.copy_(numbers(3, 2, 3, 3, seed=1))
    y = unit(x)
    (gradient,) = torch.autograd.grad((y.sin() * numbers(*y.shape, seed=2)).sum(), unit.conv.weight)
    along = (unit.conv.weight * gradient).sum((1, 2, 3))
    torch.testing.assert_close(along, torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-12)
    assert gradient.abs().max() > 1e-2

    with torch.no_grad():
        unit.conv.weight.mul_(torch.tensor([0.5, 2.0, 17.0])[:, None, None, None])
    torch.testing.assert_close(unit(x), y, rtol=0, atol=1e-10)
    set_norm(unit, "running")
    scaled = unit(x)
    with torch.no_grad():
        unit.conv.weight.mul_(2)
    torch.testing.assert_close(unit(x), 2 * scaled, rtol=0, atol=1e-10)


def test_freeze_turns_parameters_into_buffers_of_the_same_names_and_values() -> None:
    block = ResidualBlock(2, 3, torch.relu)
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    x = numbers(2, 2, 6, 6).float()
    output = block(x)
    assert freeze(block) is block
    assert list(block.parameters()) == []
    assert block.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in block.state_dict().items())
    assert torch.equal(block(x), output) and not block(x).requires_grad


def test_weights_start_normal_and_biases_at_zero_or_uniform() -> None:
    layer = nn.Sequential(nn.Conv2d(30, 40, 3), nn.Linear(100, 400))
    initialise(layer, 0.02, generator(0))
    for part in layer:
        assert part.weight.std().item() == pytest.approx(0.02, rel=0.02)
        assert part.bias.abs().max() == 0
    initialise(layer, 0.02, generator(0), uniform_bias=True)
    for part, fan_in in zip(layer, (270, 100), strict=True):
        bound = fan_in**-0.5
        assert 0.9 * bound < part.bias.abs().max() <= bound
        assert part.bias.min() < 0 < part.bias.max()


def test_the_same_generator_gives_the_same_start() -> None:
    one, other, third = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(3, 4)
    for layer, seed in ((one, 1), (other, 1), (third, 2)):
        initialise(layer, 0.1, generator(seed))
    assert torch.equal(one.weight, other.weight) and not torch.equal(one.weight, third.weight)


def test_a_residual_block_is_its_equation() -> None:
    """leaky(f3(leaky(f2(leaky(f1 u)))) + shortcut(u)), pooled"""
    block, u = ResidualBlock(2, 3, torch.relu).double(), numbers(3, 2, 6, 6)
    first, second, third = block.units
    y = third(torch.relu(second(torch.relu(first(u))))) + block.shortcut(u)
    expected = nn.functional.max_pool2d(torch.relu(y), 2)
    torch.testing.assert_close(block(u), expected, rtol=0, atol=1e-12)
    assert ResidualBlock(2, 3, torch.relu, pool=False)(u.float()).shape == (3, 3, 6, 6)


class Doubling(nn.Module):
    """A warp that can be told apart from every other layer."""

    def __init__(self, channels: int) -> None:
        super().__init__()

    def forward(self, y: Tensor, fixed: object = None) -> Tensor:
        return 2 * y


@pytest.mark.parametrize("after", [True, False])
def test_the_warp_of_a_residual_block_stands_where_it_is_put(after: bool) -> None:
    block = ResidualBlock(2, 3, torch.relu, warp=Doubling, warp_after_block=after).double()
    u = numbers(3, 2, 6, 6)
    first, second, third = block.units
    branch = third(torch.relu(second(torch.relu(first(u)))))
    before, behind = (1, 2) if after else (2, 1)
    expected = behind * nn.functional.max_pool2d(torch.relu(before * branch + block.shortcut(u)), 2)
    torch.testing.assert_close(block(u), expected, rtol=0, atol=1e-12)
