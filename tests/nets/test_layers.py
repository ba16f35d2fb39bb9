"""Law C25, the blocks as equations, and that nobody has to guess a layer's mode."""

from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npbml.nets import layers
from npbml.nets.layers import (
    ConvBlock,
    ConvUnit,
    Norm,
    NormUnit,
    ResidualBlock,
    WideBlock,
    freeze,
    highest_of_four,
    initialise,
    set_norm,
)
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


class Bend(nn.Module):
    """A warp that commutes with no other layer, not even with batch norm."""

    def __init__(self, channels: int) -> None:
        super().__init__()

    def forward(self, y: Tensor, fixed: object = None) -> Tensor:
        return y.square() - 0.5 * y


class Tint(nn.Module):
    """A modulation that shows what it is given, and refuses what has not the channels it was made for."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.sizes = inputs, outputs

    def forward(self, u: Tensor, y: Tensor, fixed: dict[object, object] | None = None) -> Tensor:
        assert (u.shape[1], y.shape[1]) == self.sizes
        if fixed is not None:
            fixed[self] = True
        return y + u.flatten(1).square().mean(1)[:, None, None, None] * y.cos()


def close(y: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)


def test_a_unit_is_convolution_bias_warp_norm_and_modulation_in_this_order() -> None:
    unit, x = ConvUnit(2, 3, film=Tint, warp=Bend, bias=True).double(), numbers(4, 2, 6, 6)
    y = F.conv2d(x, unit.conv.weight, padding=1) + unit.conv.bias[:, None, None]
    close(unit(x), unit.film(x, unit.norm(Bend(3)(y))))


def test_a_unit_can_do_without_norm_and_bias() -> None:
    unit, x = ConvUnit(2, 3, kernel=1, norm=False).double(), numbers(4, 2, 1, 1)
    assert [name for name, _ in unit.named_parameters()] == ["conv.weight"]
    close(unit(x)[:, :, 0, 0], x[:, :, 0, 0] @ unit.conv.weight[:, :, 0, 0].T)


@pytest.mark.parametrize("position", ["after_pool", "pre_activation", "pre_norm"])
@pytest.mark.parametrize("pool", [True, False])
def test_the_warp_of_a_convolution_block_stands_where_it_is_put(position: str, pool: bool) -> None:
    block = ConvBlock(2, 3, torch.relu, pool=pool, warp=Bend, warp_position=position).double()  # type: ignore
    u, warp = numbers(3, 2, 7, 7), Bend(3)
    y = block.unit.conv(u)
    y = block.unit.norm(warp(y) if position == "pre_norm" else y)
    y = (warp(y) if position == "pre_activation" else y).relu()
    y = F.max_pool2d(y, 2) if pool else y
    close(block(u), warp(y) if position == "after_pool" else y)


@pytest.mark.parametrize("position", ["before_addition", "after_block"])
def test_the_warp_of_a_residual_block_stands_where_it_is_put(position: str) -> None:
    block = ResidualBlock(2, 3, torch.relu, warp=Bend, warp_position=position).double()  # type: ignore
    u, warp = numbers(3, 2, 6, 6), Bend(3)
    first, second, third = block.units
    y = third(torch.relu(second(torch.relu(first(u)))))
    y = torch.relu((warp(y) if position == "before_addition" else y) + block.shortcut(u))
    close(block(u), warp(F.max_pool2d(y, 2)) if position == "after_block" else F.max_pool2d(y, 2))


def test_a_warp_before_the_norms_of_a_residual_block_is_in_every_unit_but_the_shortcut() -> None:
    block = ResidualBlock(2, 3, torch.relu, bias=True, warp=Bend, warp_position="pre_norm").double()
    y = u = numbers(3, 2, 6, 6)
    for index, unit in enumerate(block.units):
        y = unit.norm(Bend(3)(F.conv2d(y, unit.conv.weight, unit.conv.bias, padding=1)))
        y = y.relu() if index < 2 else y
    shortcut = block.shortcut.norm(F.conv2d(u, block.shortcut.conv.weight, block.shortcut.conv.bias))
    close(block(u), F.max_pool2d((y + shortcut).relu(), 2))


@pytest.mark.parametrize(("inputs", "stride"), [(2, 1), (3, 1), (3, 2), (2, 2)])
def test_a_wide_block_is_its_equation(inputs: int, stride: int) -> None:
    """v = relu(norm u);  conv(relu(norm(conv v))) + u, or + a 1x1 convolution of v where the shape changes"""
    block, u = WideBlock(inputs, 3, torch.relu, stride=stride).double(), numbers(3, inputs, 7, 7)

    def standard(x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)

    v = standard(u).relu()
    y = standard(F.conv2d(v, block.convs[0].weight, stride=stride, padding=1)).relu()
    y = F.conv2d(y, block.convs[1].weight, padding=1)
    same = inputs == 3 and stride == 1
    assert (block.shortcut is None) is same
    close(block(u), y + (u if same else F.conv2d(v, block.shortcut.weight, stride=stride)))
    assert block(u).shape == (3, 3, 7 if stride == 1 else 4, 7 if stride == 1 else 4)
    assert sum(part.bias is not None for part in block.modules() if isinstance(part, nn.Conv2d)) == 0


@pytest.mark.parametrize("position", ["before_addition", "after_block"])
def test_the_warp_of_a_wide_block_stands_where_it_is_put(position: str) -> None:
    block = WideBlock(2, 3, torch.relu, bias=True, warp=Bend, warp_position=position).double()  # type: ignore
    u, warp = numbers(3, 2, 6, 6), Bend(3)
    v = block.norms[0](u)
    y = block.convs[1](block.norms[1](block.convs[0](v)))
    expected = warp(y) + block.shortcut(v) if position == "before_addition" else warp(y + block.shortcut(v))
    close(block(u), expected)
    assert all(part.bias is not None for part in block.modules() if isinstance(part, nn.Conv2d))


def test_a_wide_block_is_modulated_after_each_norm_by_what_enters_it() -> None:
    block, u = WideBlock(2, 3, torch.relu, film=Tint).double(), numbers(3, 2, 6, 6)
    before, between = block.norms
    v = before.film(u, before.norm(u)).relu()
    w = block.convs[0](v)
    expected = block.convs[1](between.film(w, between.norm(w)).relu()) + block.shortcut(v)
    close(block(u), expected)
    fixed: dict[object, object] = {}
    block(u, fixed)
    assert set(fixed) == {before.film, between.film}


def test_a_norm_unit_ends_with_its_activation() -> None:
    unit, u = NormUnit(3, torch.relu).double(), numbers(4, 3, 5, 5)
    close(unit(u), F.batch_norm(u, None, None, training=True).relu())


@pytest.mark.parametrize("size", [(4, 6), (5, 7)])
def test_pooling_by_pairs_is_max_pooling(size: tuple[int, int]) -> None:
    """Values and second derivatives, with channels first and last, and with sides that are odd."""
    x = numbers(3, 2, *size)
    for given in (x, x.contiguous(memory_format=torch.channels_last)):
        found = []
        for pool in (highest_of_four, lambda y: F.max_pool2d(y, 2)):
            y = given.clone().requires_grad_()
            value = pool(y).exp()
            (slope,) = torch.autograd.grad(value.sum(), y, create_graph=True)
            (bend,) = torch.autograd.grad(slope.square().sum(), y)
            found.append((value, slope, bend))
        torch.testing.assert_close(*found)


def scaled_unit(scales: list[float]) -> ConvUnit:
    unit = ConvUnit(3, len(scales), bias=True).double()
    with torch.no_grad():
        unit.norm.weight.copy_(torch.tensor(scales))
        unit.norm.bias.copy_(numbers(len(scales), seed=5))
        unit.conv.weight.copy_(numbers(len(scales), 3, 3, 3, seed=6))
    return unit


def test_batch_norm_may_follow_the_pooling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same values and derivatives, of first and second order, for scales of either sign."""
    monkeypatch.setattr(layers, "LARGE_MAP", 0)
    unit, x = scaled_unit([1.0, -0.5, 2.0, -1.5]), numbers(4, 3, 7, 6).requires_grad_()
    parameters = [x, unit.conv.weight, unit.norm.weight, unit.norm.bias]
    found = []
    for y in (unit.halved(x), layers.halve(unit(x))):
        first = torch.autograd.grad(y.pow(3).sum(), parameters, create_graph=True)
        second = torch.autograd.grad(sum(g.pow(2).sum() for g in first), parameters)
        found.append([y, *first, *second])
    assert "Addcmul" in type(found[0][0].grad_fn).__name__  # it did follow
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_a_scale_of_zero_still_has_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "LARGE_MAP", 0)
    unit = scaled_unit([0.0, 1.0])
    (gradient,) = torch.autograd.grad(unit.halved(numbers(4, 3, 6, 6)).pow(3).sum(), unit.norm.weight)
    assert gradient[0].abs() > 1e-3


def test_batch_norm_follows_the_pooling_of_large_maps_alone() -> None:
    small, large = numbers(2, 3, 8, 8), numbers(128, 3, 16, 16)
    for x, follows in ((small, False), (large, True)):
        for mode in ("batch", "running"):
            unit = scaled_unit([1.0, -1.0])
            unit.norm.mode = mode
            name = type(unit.halved(x).grad_fn).__name__
            assert ("Addcmul" in name) == (follows and mode == "batch")
