"""Law C12, and what MeTAL's losses are: per-step networks whose weights an adapter moves."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npbml.randomness import generator
from npbml.rule.adaptive import (
    AdaptiveLoss,
    AdaptiveQuery,
    AdaptiveSupport,
    query_inputs,
    standardise,
    support_inputs,
)
from npbml.rule.descend import Parameters
from npbml.rule.loss import Items, LearnedLoss, Sizes
from npbml.rule.settings import LossSettings

WAYS, FEATURES, SUPPORT, QUERY, STEPS = 3, 4, 6, 5, 2
LABELS = torch.eye(WAYS, dtype=torch.float64).repeat(2, 1)

Module = TypeVar("Module", bound=nn.Module)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed, "numbers"), dtype=torch.float64)


def shaken(module: Module, seed: int = 7) -> Module:
    """Every tensor, k and c too, away from its start; by this seed no adapter's hidden units are all silent."""
    module = module.double()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator(seed, name), dtype=torch.float64)
            parameter.copy_(0.5 * noise)
    return module


def make_theta(seed: int = 0) -> Parameters:
    return {"weight": numbers(WAYS, FEATURES, seed=seed), "bias": numbers(WAYS, seed=seed + 20)}


def make_features(seed: int = 2) -> Tensor:
    return numbers(SUPPORT + QUERY, FEATURES, seed=seed)


def make_losses(tensors: int = 2) -> Any:
    """The terms of all steps, for as many adapted tensors."""
    sizes, settings = Sizes(WAYS, tensors, STEPS), LossSettings()
    terms = {"support": AdaptiveSupport(sizes, settings), "query": AdaptiveQuery(sizes, settings)}
    return shaken(nn.ModuleDict(terms))


def item_losses(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits, LABELS, reduction="none")


def values_of(
    losses: Any, step: int, base: Tensor, theta: Parameters, support: Tensor, labels: Tensor, query: Tensor
) -> dict[str, Tensor]:
    items = Items(support, labels, query, query.new_zeros(len(query), 0), theta, step, base)
    return {name: term(items) for name, term in losses.items()}


def inner_loss(losses: Any, step: int, theta: Parameters, features: Tensor) -> Tensor:
    """M_j of a linear head."""
    logits = F.linear(features, theta["weight"], theta["bias"])
    base = item_losses(logits[:SUPPORT])
    terms = values_of(losses, step, base, theta, logits[:SUPPORT], LABELS, logits[SUPPORT:])
    return base.mean() + sum(terms.values())


def outer_loss(losses: Any, theta: Parameters, features: Tensor) -> Tensor:
    """The query cross-entropy of a linear head after a step on each M_j."""
    for step in range(STEPS):
        gradient = torch.func.grad(lambda t, j=step: inner_loss(losses, j, t, features))(theta)
        theta = {name: theta[name] - 0.1 * gradient[name] for name in theta}
    return F.cross_entropy(F.linear(features[SUPPORT:], theta["weight"], theta["bias"]), LABELS[:QUERY])


def mlp(layers: list[Tensor], x: Tensor) -> Tensor:
    """One item through linear, ReLU, linear."""
    w1, b1, w2, b2 = layers
    return w2 @ (w1 @ x + b1).clamp(min=0) + b2


def make_loss(k: float, c: float) -> AdaptiveLoss:
    loss = shaken(AdaptiveLoss(7, 5))
    with torch.no_grad():
        loss.k.mul_(k)
        loss.c.mul_(c)
    return loss


@pytest.mark.parametrize(("k", "c"), [(1, 1), (1, 0), (0, 1), (0, 0)])
def test_c12_the_loss_is_the_mean_of_a_network_with_the_adapted_weights(k: float, c: float) -> None:
    loss, items, state = make_loss(k, c), numbers(4, 7), numbers(5, seed=1)
    moves = mlp([p.detach() for p in loss.adapter.parameters()], state)
    phi = [loss.hidden.weight, loss.hidden.bias, loss.last.weight, loss.last.bias]
    adapted = [(1 + loss.k[i] * moves[i]) * phi[i] + loss.c[i] * moves[4 + i] for i in range(4)]
    expected = sum(mlp(adapted, x)[0] for x in items) / 4
    value = loss(items, state)
    assert value.shape == ()
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-10)


def test_c12_adapters_are_inert_where_k_and_c_are_zero() -> None:
    """Same value and same gradient in theta as the networks by themselves."""
    losses, theta, features = make_losses(), make_theta(), make_features()

    def bare(t: Parameters) -> Tensor:
        logits = F.linear(features, t["weight"], t["bias"])
        total = base = F.cross_entropy(logits[:SUPPORT], LABELS)
        for networks, (items, _) in (
            (losses["support"], support_inputs(base, t, logits[:SUPPORT], LABELS)),
            (losses["query"], query_inputs(t, logits[SUPPORT:])),
        ):
            total = total + nn.Sequential(networks[0].hidden, nn.ReLU(), networks[0].last)(items).mean()
        return total

    def compare() -> list[Tensor]:
        gradient, value = torch.func.grad_and_value(lambda t: inner_loss(losses, 0, t, features))(theta)
        expected, total = torch.func.grad_and_value(bare)(theta)
        return [(value - total).abs(), *((gradient[name] - expected[name]).abs().max() for name in theta)]

    assert min(compare()) > 1e-3
    for name, parameter in losses.named_parameters():
        if name.endswith((".k", ".c")):
            nn.init.zeros_(parameter)
    assert max(compare()) < 1e-12


def test_standardised_numbers_have_mean_zero_and_deviation_one() -> None:
    x = 3 * numbers(4, 7) + 2
    y = standardise(x)
    torch.testing.assert_close(y, (x - x.mean()) / x.std(), rtol=0, atol=1e-10)
    assert y.mean().item() == pytest.approx(0, abs=1e-12) and y.std().item() == pytest.approx(1, abs=1e-10)


def test_equal_numbers_become_zero_with_finite_derivatives() -> None:
    x = torch.full((3, 4), 0.7, dtype=torch.float64)
    direction = numbers(3, 4)

    def value(x: Tensor) -> Tensor:
        return (standardise(x) * direction).sum() + standardise(x).square().sum()

    assert standardise(x).abs().max() < 1e-8
    gradient = torch.func.grad(value)
    assert gradient(x).isfinite().all() and torch.func.jacrev(gradient)(x).isfinite().all()


def test_the_support_inputs_are_laid_out_as_metals() -> None:
    """[CE_S, the mean of each tensor, logits, one-hot label] of each item; the state is the first part alone."""
    theta, logits, base = make_theta(), numbers(SUPPORT, WAYS, seed=3), torch.tensor(1.7, dtype=torch.float64)
    items, state = support_inputs(base, theta, logits, LABELS)
    shared = [1.7, theta["weight"].mean().item(), theta["bias"].mean().item()]
    rows = torch.tensor(
        [[*shared, *z, *y] for z, y in zip(logits.tolist(), LABELS.tolist(), strict=True)], dtype=torch.float64
    )
    assert items.shape == (SUPPORT, 2 + 1 + 2 * WAYS) and state.shape == (3,)
    torch.testing.assert_close(items, (rows - rows.mean()) / rows.std(), rtol=0, atol=1e-10)
    first = rows[0, :3]
    torch.testing.assert_close(state, (first - first.mean()) / first.std(), rtol=0, atol=1e-10)


def test_the_query_inputs_are_laid_out_as_metals() -> None:
    """[the mean of each tensor, logits, sum_c p_c log p_c] of each item; the state is their mean."""
    theta, logits = make_theta(), numbers(QUERY, WAYS, seed=4)
    items, state = query_inputs(theta, logits)
    shared, rows = [theta["weight"].mean().item(), theta["bias"].mean().item()], []
    for z in logits.tolist():
        total = sum(math.exp(value) for value in z)
        p = [math.exp(value) / total for value in z]
        rows.append([*shared, *z, sum(value * math.log(value) for value in p)])
    table = torch.tensor(rows, dtype=torch.float64)
    table = (table - table.mean()) / table.std()
    assert items.shape == (QUERY, 2 + WAYS + 1) and state.shape == (2 + WAYS + 1,)
    torch.testing.assert_close(items, table, rtol=0, atol=1e-10)
    torch.testing.assert_close(state, table.sum(0) / QUERY, rtol=0, atol=1e-10)


def test_the_terms_are_those_of_their_step() -> None:
    losses, theta = make_losses(), make_theta()
    support, query = numbers(SUPPORT, WAYS, seed=3), numbers(QUERY, WAYS, seed=4)
    base, values = item_losses(support), []
    for step in range(STEPS):
        terms = values_of(losses, step, base, theta, support, LABELS, query)
        one = losses["support"][step](*support_inputs(base.mean(), theta, support, LABELS))
        two = losses["query"][step](*query_inputs(theta, query))
        assert terms["support"] == one and terms["query"] == two
        values += [one.item(), two.item()]
    assert len(set(values)) == 2 * STEPS


@pytest.mark.parametrize(("on", "off"), [("support", "query"), ("query", "support")])
def test_a_term_that_is_off_is_not_there(on: str, off: str) -> None:
    bare = {"base": False, "inductive": False, "transductive": False, "regulariser": False}

    def make(**terms: bool) -> LearnedLoss:
        return shaken(LearnedLoss(LossSettings(**bare, **terms), WAYS, 2, STEPS))

    losses, full = make(**{f"adaptive_{on}": True}), make(adaptive_support=True, adaptive_query=True)
    assert all(name.startswith(f"adaptive_{on}.") for name, _ in losses.named_parameters())
    assert losses.term(f"adaptive_{off}") is None
    support, query = numbers(SUPPORT, WAYS, seed=3), numbers(QUERY, WAYS, seed=4)
    arguments = (support, LABELS, query, query.new_zeros(QUERY, 0), make_theta(), 1)
    assert list(full.terms(*arguments)) == ["adaptive_support", "adaptive_query"]
    assert losses.terms(*arguments) == {f"adaptive_{on}": full.terms(*arguments)[f"adaptive_{on}"]}


def test_the_order_of_items_does_not_matter() -> None:
    losses, theta = make_losses(), make_theta()
    support, query = numbers(SUPPORT, WAYS, seed=3), numbers(QUERY, WAYS, seed=4)
    base = item_losses(support)
    one = values_of(losses, 0, base, theta, support, LABELS, query)
    s, q = torch.tensor([4, 0, 5, 1, 3, 2]), torch.tensor([2, 4, 0, 1, 3])
    other = values_of(losses, 0, base[s], theta, support[s], LABELS[s], query[q])
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=1e-12)
    mislabelled = values_of(losses, 0, base, theta, support[s], LABELS, query)
    assert (mislabelled["support"] - one["support"]).abs() > 1e-3


def test_c30_vmap_over_tasks_is_the_loop() -> None:
    losses = make_losses()
    thetas, features = [make_theta(seed) for seed in range(3)], [make_features(seed) for seed in range(3)]
    stacked = {name: torch.stack([theta[name] for theta in thetas]) for name in thetas[0]}
    together = torch.vmap(lambda theta, x: outer_loss(losses, theta, x))(stacked, torch.stack(features))
    loop = torch.stack([outer_loss(losses, theta, x) for theta, x in zip(thetas, features, strict=True)])
    torch.testing.assert_close(together, loop, rtol=0, atol=1e-10)
    parameters = list(losses.parameters())
    one, other = (
        torch.autograd.grad(loss.sum(), parameters, allow_unused=True, materialize_grads=True)
        for loss in (together, loop)
    )
    torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_c17_the_meta_gradient_is_that_of_finite_differences() -> None:
    losses, features = make_losses(), make_features()
    theta = {name: value.requires_grad_() for name, value in make_theta().items()}
    inputs: dict[str, Tensor] = {**dict(losses.named_parameters()), **theta}
    gradients = torch.autograd.grad(
        outer_loss(losses, theta, features), list(inputs.values()), allow_unused=True, materialize_grads=True
    )
    for (name, tensor), gradient in zip(inputs.items(), gradients, strict=True):
        direction, values, step = numbers(*tensor.shape, seed=9), [], 1e-6
        for sign in (1, -1):
            with torch.no_grad():
                tensor.add_(sign * step * direction)
                values.append(outer_loss(losses, theta, features))
                tensor.sub_(sign * step * direction)
        slope = ((values[0] - values[1]) / (2 * step)).item()
        assert (gradient * direction).sum().item() == pytest.approx(slope, rel=1e-6, abs=1e-8), name
        assert gradient.abs().max() > 0, name


def unicorn(theta: Parameters) -> Parameters:
    return {"weight": theta["weight"][:1].expand(WAYS, -1).clone(), "bias": torch.zeros_like(theta["bias"])}


def zero(theta: Parameters) -> Parameters:
    return {name: torch.zeros_like(value) for name, value in theta.items()}


def confident(theta: Parameters) -> Parameters:
    """Probabilities that are 0 in float64."""
    return {name: 1e4 * value for name, value in theta.items()}


@pytest.mark.parametrize("start", [unicorn, zero, confident])
def test_meta_gradients_are_finite_at_the_edges(start: Callable[[Parameters], Parameters]) -> None:
    losses = make_losses()
    theta = {name: value.requires_grad_() for name, value in start(make_theta()).items()}
    loss = outer_loss(losses, theta, make_features())
    inputs = [*losses.parameters(), *theta.values()]
    assert loss.isfinite()
    gradients = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_it_begins_with_small_weights_and_silent_adapters() -> None:
    def begun(seed: int) -> nn.ModuleDict:
        losses, random = make_losses(tensors=10), generator(seed, "losses")
        for term in losses.values():
            term.begin(0.01, random, False)
        return losses

    losses, same, other = (dict(begun(seed).named_parameters()) for seed in (0, 0, 1))
    for name, parameter in losses.items():
        assert torch.equal(parameter, same[name])
        if name.endswith("weight"):
            assert parameter.std().item() == pytest.approx(0.01, rel=0.5)
            assert not torch.equal(parameter, other[name])
        else:
            assert parameter.abs().max() == 0
