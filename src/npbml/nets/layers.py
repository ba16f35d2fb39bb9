"""The layers that every network is made of."""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npbml.nets.settings import WarpPosition

Film = Callable[[int, int], nn.Module]  # (channels in, channels out) -> a module (u, y, fixed) -> y
Warp = Callable[[int], nn.Module]  # channels -> a module (y, fixed) -> y
Activation = Callable[[Tensor], Tensor]
LARGE_MAP = 1 << 16  # numbers in a batch's map; less is done sooner by one call of torch's own batch norm


class Norm(nn.Module):
    """Batch normalisation whose mode is explicit: nobody has to guess what `train()` and `eval()` do to it.

    mode "track"    normalise by the batch and update the running averages (pre-training)
    mode "batch"    normalise by the batch, keep no state (docs/method.md, item 1)
    mode "running"  normalise by the running averages, so that items do not see each other
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.eps, self.momentum = eps, momentum
        self.mode: Literal["track", "batch", "running"] = "batch"
        self.adapts = False  # whether scale and shift differ from task to task
        self.total: Callable[[Tensor], Tensor] | None = None  # sums over those that share a batch in mode "track"

    def forward(self, x: Tensor) -> Tensor:
        track = self.mode == "track"
        if track and self.total is not None:
            return self._track_together(x, self.total)
        mean, var = (None, None) if self.mode == "batch" else (self.running_mean, self.running_var)
        train = self.mode != "running"
        if track or not self.adapts:
            return F.batch_norm(x, mean, var, self.weight, self.bias, train, self.momentum, self.eps)
        # With a scale and shift of each task's own, torch's batched second derivative of batch_norm is wrong
        # (found by law C30): they are applied apart.
        y = F.batch_norm(x, mean, var, None, None, train, self.momentum, self.eps)
        space = (1,) * (x.dim() - 2)
        return self.weight.view(-1, *space) * y + self.bias.view(-1, *space)

    def by_moments(self, x: Tensor, mean: Tensor, var: Tensor, sign: Tensor) -> Tensor:
        """x normalised by the moments of what it was taken from, scaled by sign * weight and shifted."""
        scale = sign * self.weight * (var + self.eps).rsqrt()
        return torch.addcmul(_by_channel(self.bias - mean * scale), x, _by_channel(scale))

    def _track_together(self, x: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
        """Mode "track" of a batch of which others have the rest."""
        channels, axes = x.movedim(1, -1), tuple(range(x.dim() - 1))
        sums = total(torch.cat([channels.sum(axes), x.new_full((1,), x.numel() / x.shape[1])]))
        mean, count = sums[:-1] / sums[-1], sums[-1]
        centred = channels - mean
        var = total(centred.square().sum(axes)) / count
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * count / (count - 1), self.momentum)
        return (centred * (var + self.eps).rsqrt() * self.weight + self.bias).movedim(-1, 1)


class Moments(torch.autograd.Function):
    """Mean and variance of every channel: [n, channels, height, width] -> [channels], [channels].

    Their gradient is linear in x: one pass over it, and its own gradient takes three. torch composes the second
    derivative of batch_norm of many more, and its var_mean on a CPU takes three times as long as batch_norm.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        mean = x.mean((0, 2, 3), keepdim=True)
        apart = x - mean
        return mean.flatten(), apart.mul_(apart).mean((0, 2, 3))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(inputs[0], output[0])

    @staticmethod
    def backward(ctx: Any, of_mean: Tensor, of_var: Tensor) -> Tensor:
        x, mean = ctx.saved_tensors
        count = x.numel() / x.shape[1]
        slope = 2 * of_var / count
        return torch.addcmul(_by_channel(of_mean / count - slope * mean), x, _by_channel(slope))


def _by_channel(x: Tensor) -> Tensor:
    return x.view(-1, 1, 1)


def halve(x: Tensor) -> Tensor:
    """2x2 max pooling"""
    if not (torch.compiler.is_compiling() and x.is_cuda):
        return F.max_pool2d(x, 2)
    return highest_of_four(x)  # compiled for a GPU, the backward of max_pool2d is a slow scatter


def highest_of_four(x: Tensor) -> Tensor:
    """2x2 max pooling by pairs.

    The gradient of a maximum over an axis goes to where x equals it; where a compiled kernel computes x again and
    rounds in another way, it may equal nothing. A pair is compared, and one of the two is the higher.
    """
    *lead, height, width = x.shape
    x = x[..., : height // 2 * 2, : width // 2 * 2].reshape(*lead, height // 2, 2, width // 2, 2)
    (a, b), (c, d) = (row.unbind(-1) for row in x.unbind(-3))
    return torch.maximum(torch.maximum(a, b), torch.maximum(c, d))


def channels_last(images: Tensor) -> Tensor:
    """Images [n, channels, height, width] as a GPU's convolutions like them best; a CPU's as they are."""
    if images.is_cuda and images.shape[-1] > 1:
        return images.contiguous(memory_format=torch.channels_last)
    return images


def set_norm(module: nn.Module, mode: Literal["track", "batch", "running"]) -> None:
    """Put every batch normalisation below `module` into one mode."""
    for part in module.modules():
        if isinstance(part, Norm):
            part.mode = mode


class ConvUnit(nn.Module):
    """A convolution and, where they are wanted, a warp, batch normalisation and its modulation."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int = 3,
        film: Film | None = None,
        warp: Warp | None = None,
        bias: bool = False,
        norm: bool = True,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=bias)
        self.warp = warp(outputs) if warp else None
        self.norm = Norm(outputs) if norm else None
        self.film = film(inputs, outputs) if film else None

    def forward(self, u: Tensor, fixed: dict[Any, Any] | None = None) -> Tensor:
        y = self.conv(u)
        if self.warp is not None:
            y = self.warp(y, fixed)
        if self.norm is not None:
            y = self.norm(y)
        return y if self.film is None else self.film(u, y, fixed)

    def halved(self, u: Tensor, fixed: dict[Any, Any] | None = None) -> Tensor:
        """2x2 max pooling of it.

        On a CPU, batch norm of a large map follows the pooling if nothing stands between them. It never decreases,
        so that these are the same values from a quarter of the work; where its scale is negative, the sign of the
        filter is turned to make it positive. Compiled code and a GPU's own batch norm are better left as they are.
        """
        if not self._norm_can_follow(u):
            return halve(self(u, fixed))
        norm, conv = self.norm, self.conv
        assert norm is not None
        sign = torch.where(norm.weight < 0, -1.0, 1.0).to(u.dtype)
        bias = None if conv.bias is None else sign * conv.bias
        y = F.conv2d(u, sign.view(-1, 1, 1, 1) * conv.weight, bias, padding=conv.padding)
        mean, var = Moments.apply(y)
        return norm.by_moments(halve(y), mean, var, sign)

    def _norm_can_follow(self, u: Tensor) -> bool:
        bare = self.norm is not None and self.norm.mode == "batch" and self.warp is None and self.film is None
        exact = u.dtype in (torch.float32, torch.float64)
        if not bare:  # without a look at the number of images, which an exported network does not know
            return False
        pays = len(u) * self.conv.out_channels * u.shape[-2] * u.shape[-1] >= LARGE_MAP
        return exact and pays and not u.is_cuda and not torch.compiler.is_compiling()


class NormUnit(nn.Module):
    """Batch normalisation, its modulation and the activation: what stands before a convolution of a WideBlock."""

    def __init__(self, channels: int, activation: Activation, film: Film | None = None) -> None:
        super().__init__()
        self.norm = Norm(channels)
        self.film = film(channels, channels) if film else None
        self.activation = activation

    def forward(self, u: Tensor, fixed: dict[Any, Any] | None = None) -> Tensor:
        y = self.norm(u)
        return self.activation(y if self.film is None else self.film(u, y, fixed))


class Block(nn.Module):
    """What every block has: an activation, and perhaps a warp, at one of the places that `forward` names.

    At pre_norm the warps stand in the block's units, before batch norm, and the block itself has none.
    """

    warp: nn.Module | None

    def __init__(self, activation: Activation, warp_position: WarpPosition, pool: bool) -> None:
        super().__init__()
        self.activation, self.warp_position, self.pool = activation, warp_position, pool

    def activated(self, y: Tensor) -> Tensor:
        """Activation and pooling. Activations never decrease, so that the highest of four may as well be found
        first: the same values, from a quarter of the work."""
        return self.activation(halve(y) if self.pool else y)

    def warped(self, y: Tensor, fixed: dict[Any, Any] | None, position: WarpPosition) -> Tensor:
        return y if self.warp is None or position != self.warp_position else self.warp(y, fixed)


class ConvBlock(Block):
    """Convolution, batch norm, modulation, activation, 2x2 max pooling (docs/method.md).

    Without the norm and the pooling, on images of one pixel, it is a layer of a fully connected network.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        activation: Activation,
        kernel: int = 3,
        norm: bool = True,
        pool: bool = True,
        bias: bool = False,
        film: Film | None = None,
        warp: Warp | None = None,
        warp_position: WarpPosition = "after_pool",
    ) -> None:
        super().__init__(activation, warp_position, pool)
        inside = warp_position == "pre_norm"
        self.unit = ConvUnit(inputs, outputs, kernel, film, warp if inside else None, bias, norm)
        self.warp = warp(outputs) if warp and not inside else None

    def forward(self, u: Tensor, fixed: dict[Any, Any] | None = None) -> Tensor:
        if self.pool and (self.warp is None or self.warp_position != "pre_activation"):
            y = self.activation(self.unit.halved(u, fixed))
        else:
            y = self.activated(self.warped(self.unit(u, fixed), fixed, "pre_activation"))
        return self.warped(y, fixed, "after_pool")


class ResidualBlock(Block):
    """Three convolutions beside a 1x1 shortcut, then activation and pooling (docs/method.md)."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        activation: Activation,
        pool: bool = True,
        bias: bool = False,
        film: Film | None = None,
        film_shortcut: bool = False,
        warp: Warp | None = None,
        warp_position: WarpPosition = "before_addition",
    ) -> None:
        super().__init__(activation, warp_position, pool)
        inside = warp_position == "pre_norm"
        self.units = nn.ModuleList(
            ConvUnit(i, outputs, film=film, warp=warp if inside else None, bias=bias)
            for i in (inputs, outputs, outputs)
        )
        self.shortcut = ConvUnit(inputs, outputs, kernel=1, film=film if film_shortcut else None, bias=bias)
        self.warp = warp(outputs) if warp and not inside else None

    def forward(self, u: Tensor, fixed: dict[Any, Any] | None = None) -> Tensor:
        first, second, third = self.units
        y = self.activation(first(u, fixed))
        y = self.activation(second(y, fixed))
        y = self.warped(third(y, fixed), fixed, "before_addition")
        return self.warped(self.activated(y + self.shortcut(u, fixed)), fixed, "after_block")


class WideBlock(Block):
    """The block of a wide residual network: batch norm and activation stand before the convolutions.

    The shortcut is the identity, or a 1x1 convolution of the activated input where the shape changes.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        activation: Activation,
        stride: int = 1,
        bias: bool = False,
        film: Film | None = None,
        warp: Warp | None = None,
        warp_position: WarpPosition = "before_addition",
    ) -> None:
        super().__init__(activation, warp_position, pool=False)
        self.norms = nn.ModuleList(NormUnit(channels, activation, film) for channels in (inputs, outputs))
        self.convs = nn.ModuleList(
            (
                nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=bias),
                nn.Conv2d(outputs, outputs, 3, padding=1, bias=bias),
            )
        )
        changes = stride > 1 or inputs != outputs
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=bias) if changes else None
        self.warp = warp(outputs) if warp else None

    def forward(self, u: Tensor, fixed: dict[Any, Any] | None = None) -> Tensor:
        (before, between), (first, second) = self.norms, self.convs
        v = before(u, fixed)
        y = self.warped(second(between(first(v), fixed)), fixed, "before_addition")
        return self.warped(y + (u if self.shortcut is None else self.shortcut(v)), fixed, "after_block")


class Chain(nn.Module):
    """Blocks one after another."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, fixed: dict[Any, Any] | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, fixed)
        return x


def freeze(module: nn.Module) -> nn.Module:
    """Turn every parameter below `module` into a buffer: it is saved and moved with the module, but no
    optimiser and no gradient sees it."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            delattr(part, name)
            part.register_buffer(name, parameter.detach().clone())
    return module


def initialise(module: nn.Module, std: float, generator: torch.Generator, uniform_bias: bool = False) -> None:
    """Weights of every convolution and linear layer ~ N(0, std^2); biases 0, or torch's uniform default."""
    for part in module.modules():
        if isinstance(part, (nn.Conv2d, nn.Linear)):
            with torch.no_grad():
                part.weight.normal_(0.0, std, generator=generator)
                if part.bias is not None:
                    bound = part.weight[0].numel() ** -0.5 if uniform_bias else 0.0
                    part.bias.uniform_(-bound, bound, generator=generator)
