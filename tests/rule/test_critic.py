"""Law C12, and what SCA's critic is: a sum over the query items of a dense network on their logits."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from npbml.randomness import generator
from npbml.rule.critic import Critic

WAYS, ITEMS, FEATURES = 5, 6, 4
LABELS = torch.arange(ITEMS) % WAYS


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed, "numbers"), dtype=torch.float64)


def make_critic(seed: int = 0) -> Critic:
    """A critic all of whose tensors, those of the norms too, are away from their start."""
    critic = Critic(WAYS).double()
    with torch.no_grad():
        for name, parameter in critic.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator(seed, name), dtype=torch.float64)
            parameter.add_(0.3 * noise)
    return critic


def by_hand(critic: Critic, logits: Tensor) -> list[Tensor]:
    """The loss of each item, written out: every tap of a convolution is a shift of the signals."""
    signals = [torch.stack([torch.cat([z, z.abs(), z**2, z.sign()]) for z in logits])]
    for block in range(5):
        weight, new = critic.convs[block].weight, []
        for out in range(8):
            y = torch.zeros_like(signals[0])
            for channel, signal in enumerate(signals):
                for tap, step in enumerate((-(2**block), 0, 2**block)):
                    padded = F.pad(signal, (2**block, 2**block))
                    y = y + weight[out, channel, tap] * padded[:, 2**block + step :][:, : 4 * WAYS]
            norm = critic.norms[block]
            y = (y - y.mean()) / (y.var(correction=0) + 1e-5).sqrt()
            new.append((norm.weight[out] * y + norm.bias[out]).clamp(min=0))
        signals += new
    first, second, last = (layer.weight for layer in critic.layers)
    return [
        last[0] @ (second @ (first @ torch.cat([s[i] for s in signals])).relu()).relu() for i in range(len(logits))
    ]


def head(seed: int = 0) -> dict[str, Tensor]:
    return {
        "weight": numbers(WAYS, FEATURES, seed=seed),
        "bias": torch.zeros(WAYS, dtype=torch.float64),
    }


def outer_loss(critic: Critic, theta: dict[str, Tensor], features: Tensor, rate: float = 0.1) -> Tensor:
    """The query cross-entropy after one step of a linear head on the critic alone."""
    gradient = torch.func.grad(lambda t: critic(F.linear(features, t["weight"], t["bias"])))(theta)
    weight, bias = (theta[name] - rate * gradient[name] for name in ("weight", "bias"))
    return F.cross_entropy(F.linear(features, weight, bias), LABELS)


def test_the_critic_is_the_definition_written_out() -> None:
    critic, logits = make_critic(), numbers(4, WAYS)
    value = critic(logits)
    assert value.shape == ()
    torch.testing.assert_close(value, sum(by_hand(critic, logits)), rtol=0, atol=1e-10)


def test_its_sizes_are_scas() -> None:
    """Five convolutions without bias, each on all that came before; 164 N -> 16 -> 16 -> 1 without bias."""
    shapes = {name: tuple(parameter.shape) for name, parameter in Critic(WAYS).named_parameters()}
    convs = {f"convs.{i}.weight": (8, 1 + 8 * i, 3) for i in range(5)}
    norms = {f"norms.{i}.{name}": (8,) for i in range(5) for name in ("weight", "bias")}
    layers = {"layers.0.weight": (16, 164 * WAYS), "layers.1.weight": (16, 16), "layers.2.weight": (1, 16)}
    assert shapes == convs | norms | layers


def test_c12_a_critic_whose_last_layer_is_zero_leaves_the_parameters_where_they_are() -> None:
    critic, theta, features = make_critic(), head(), numbers(ITEMS, FEATURES, seed=1)

    def gradient() -> Tensor:
        return torch.func.grad(lambda t: critic(F.linear(features, t["weight"], t["bias"])))(theta)["weight"]

    before = F.cross_entropy(F.linear(features, theta["weight"], theta["bias"]), LABELS)
    assert gradient().abs().max() > 1e-3 and outer_loss(critic, theta, features) != before
    torch.nn.init.zeros_(critic.layers[-1].weight)
    assert gradient().abs().max() == 0
    assert outer_loss(critic, theta, features) == before


def test_it_is_a_sum_over_items_in_any_order() -> None:
    """Items that are all there twice leave the statistics of the batch norm alone, and so double the sum."""
    critic, logits = make_critic(), numbers(ITEMS, WAYS)
    once = critic(logits)
    assert once.abs() > 1e-2
    torch.testing.assert_close(critic(torch.cat([logits, logits])), 2 * once, rtol=1e-10, atol=0)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    torch.testing.assert_close(critic(logits[order]), once, rtol=1e-10, atol=0)


def test_items_see_each_other_through_the_batch_norm() -> None:
    critic, logits = make_critic(), numbers(ITEMS, WAYS)
    apart = sum(critic(part) for part in logits.split(1))
    assert (critic(logits) - apart).abs() > 1e-2


def test_c30_vmap_over_tasks_is_the_loop() -> None:
    critic, features = make_critic(), numbers(3, ITEMS, FEATURES, seed=1)
    thetas = [head(seed) for seed in range(3)]
    stacked = {name: torch.stack([theta[name] for theta in thetas]) for name in thetas[0]}
    together = torch.vmap(lambda theta, x: outer_loss(critic, theta, x))(stacked, features)
    loop = torch.stack([outer_loss(critic, theta, x) for theta, x in zip(thetas, features, strict=True)])
    torch.testing.assert_close(together, loop, rtol=0, atol=1e-10)
    parameters = list(critic.parameters())
    for one, other in zip(
        torch.autograd.grad(together.sum(), parameters), torch.autograd.grad(loop.sum(), parameters), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_c17_the_meta_gradient_is_that_of_finite_differences() -> None:
    critic, theta, features = make_critic(), head(), numbers(ITEMS, FEATURES, seed=1)
    theta = {name: value.clone().requires_grad_() for name, value in theta.items()}
    inputs: dict[str, Tensor] = {**dict(critic.named_parameters()), **theta}
    gradients = torch.autograd.grad(outer_loss(critic, theta, features), list(inputs.values()))
    for (name, tensor), gradient in zip(inputs.items(), gradients, strict=True):
        direction, values, step = numbers(*tensor.shape, seed=9), [], 1e-6
        for sign in (1, -1):
            with torch.no_grad():
                tensor.add_(sign * step * direction)
                values.append(outer_loss(critic, theta, features))
                tensor.sub_(sign * step * direction)
        slope = ((values[0] - values[1]) / (2 * step)).item()
        assert (gradient * direction).sum().item() == pytest.approx(slope, rel=1e-6, abs=1e-8), name
        # What only shifts the last ReLUs moves no slope, and so no step.
        assert gradient.abs().max() > 0 or name == "norms.4.bias", name


@pytest.mark.parametrize("start", ["equal", "zero", "same items"])
def test_meta_gradients_are_finite_where_logits_are_equal(start: str) -> None:
    """The start of a unicorn head: one row for every class, its bias zero; and where all is zero."""
    critic, features, theta = make_critic(), numbers(ITEMS, FEATURES, seed=1), head()
    theta["weight"] = theta["weight"][:1].expand(WAYS, -1) * (start != "zero")
    if start == "same items":
        features = features[:1].expand(ITEMS, -1)
    theta = {name: value.clone().requires_grad_() for name, value in theta.items()}
    loss = outer_loss(critic, theta, features)
    inputs = [*critic.parameters(), *theta.values()]
    assert loss.isfinite()
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, inputs, materialize_grads=True))


def test_it_begins_quiet_but_ready_to_learn() -> None:
    """Its meta-gradient is far above that of a critic whose linear layers all begin at the same small std."""

    def begun(seed: int = 0) -> Critic:
        critic = Critic(WAYS).double()
        critic.begin(0.01, generator(seed, "critic"))
        return critic

    def measure(critic: Critic) -> tuple[float, float]:
        features, last = numbers(ITEMS, FEATURES, seed=1), critic.layers[-1].weight
        (gradient,) = torch.autograd.grad(outer_loss(critic, head(), features, 0.01), last)
        return critic(numbers(ITEMS, WAYS)).abs().item() / ITEMS, gradient.norm().item()

    critic, dull = begun(), begun()
    for layer in dull.layers:
        torch.nn.init.normal_(layer.weight, 0, 0.01, generator=generator(0, "dull"))
    assert measure(critic)[0] < 0.1
    assert measure(critic)[1] > 30 * measure(dull)[1]
    for layer, std in zip(critic.layers, (1 / math.sqrt(164 * WAYS), 1 / 4, 0.01), strict=True):
        assert layer.weight.std().item() == pytest.approx(std, rel=0.5)
    for conv in critic.convs:
        assert conv.weight.std().item() == pytest.approx(0.01, rel=0.5)
    state: dict[str, Any] = begun().state_dict()
    assert all(torch.equal(value, state[name]) for name, value in critic.state_dict().items())
    assert not torch.equal(begun(1).layers[0].weight, critic.layers[0].weight)
