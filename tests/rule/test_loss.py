"""Laws C2, C23 and C27: the meta-learned loss M = L_base + L^S + L^Q + R."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from npbml.learner.learner import Learner
from npbml.randomness import generator
from npbml.rule.loss import LearnedLoss, LossNetwork, cross_entropy, one_hot, tensor_statistics
from npbml.rule.settings import LossSettings
from npbml.tasks import Task

WAYS = 3


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed, "numbers"), dtype=torch.float64)


def randomised(module: torch.nn.Module, seed: int = 0) -> Any:
    module = module.double()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(
                0.5 * torch.randn(parameter.shape, generator=generator(seed, name), dtype=torch.float64)
            )
    return module


def make_loss(**changes: Any) -> LearnedLoss:
    return randomised(LearnedLoss(LossSettings(hidden=6, **changes), WAYS, 2, 3))


def network_of(loss: LearnedLoss, name: str) -> LossNetwork:
    network = loss.term(name)
    assert isinstance(network, LossNetwork)
    return network


def make_items(count: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits and one-hot labels of `count` items."""
    return numbers(count, WAYS, seed=seed), one_hot(torch.arange(count) % WAYS, WAYS, torch.float64)


def make_queries(count: int = 5, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Logits and relation scores of `count` items."""
    return numbers(count, WAYS, seed=seed), numbers(count, WAYS, seed=seed + 50).sigmoid()


THETA = {"weight": numbers(4, 3, seed=2), "bias": numbers(3, seed=3)}


def mlp(network: LossNetwork, x: Tensor) -> Tensor:
    """The loss network for one item, written out: linear, FiLM by the layer's input, ReLU."""
    assert network.films is not None
    for index, (layer, film) in enumerate(zip(network.layers, network.films, strict=True)):
        both = film.generator.weight @ x + film.generator.bias
        y = layer.weight @ x + layer.bias
        y = (1 + both[: len(y)]) * y + both[len(y) :]
        x = y.clamp(min=0) if index < 2 else y
    return x[0]


def test_the_terms_are_the_definition_written_out() -> None:
    loss, (support, labels), (query, scores) = make_loss(), make_items(), make_queries()
    terms = loss.terms(support, labels, query, scores, THETA)

    base = [F.cross_entropy(z, y.argmax()) for z, y in zip(support, labels, strict=True)]
    inductive = [
        mlp(network_of(loss, "inductive"), torch.cat([z, y, ce[None]]))
        for z, y, ce in zip(support, labels, base, strict=True)
    ]
    transductive = [
        mlp(network_of(loss, "transductive"), torch.cat([z, r, F.cross_entropy(z, r.argmax())[None]]))
        for z, r in zip(query, scores, strict=True)
    ]
    statistics = [
        value for t in THETA.values() for value in (t.mean(), t.std(), t.abs().sum(), t.square().sum().sqrt())
    ]
    expected = {
        "base": sum(base) / len(base),
        "inductive": sum(inductive) / len(inductive),
        "transductive": sum(transductive) / len(transductive),
        "regulariser": mlp(network_of(loss, "regulariser"), torch.stack(statistics)),
    }
    assert list(terms) == list(expected)
    for name, value in terms.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-10)
    total = loss(support, labels, query, scores, THETA)
    torch.testing.assert_close(total, sum(expected.values()), rtol=1e-10, atol=1e-10)


def test_soft_targets_are_the_normalised_scores() -> None:
    loss, (query, scores) = make_loss(target="soft"), make_queries()
    expected = [
        mlp(network_of(loss, "transductive"), torch.cat([z, r, -(r / r.sum() * z.log_softmax(0)).sum()[None]]))
        for z, r in zip(query, scores, strict=True)
    ]
    terms = loss.terms(*make_items(), query, scores, THETA)
    torch.testing.assert_close(terms["transductive"], sum(expected) / len(expected), rtol=0, atol=1e-10)


def test_the_score_weight_adds_the_cross_entropy_to_the_scores_with_a_weight_that_is_learned() -> None:
    loss, (query, scores) = make_loss(target="soft", score_weight=0.5), make_queries()
    with torch.no_grad():
        loss.score_weight.fill_(0.7)  # type: ignore[union-attr]
    given = (*make_items(), query, scores, THETA)
    found = loss.terms(*given)["transductive"]
    target = scores / scores.sum(1, keepdim=True)
    apart = torch.stack([F.cross_entropy(z, r) for z, r in zip(query, target, strict=True)]).mean()
    loss.score_weight, weight = None, loss.score_weight
    torch.testing.assert_close(found, loss.terms(*given)["transductive"] + 0.7 * apart, rtol=0, atol=1e-10)
    (slope,) = torch.autograd.grad(found, weight)
    torch.testing.assert_close(slope, apart, rtol=0, atol=1e-10)
    assert LearnedLoss(LossSettings(score_weight=0.5), WAYS, 2, 3).score_weight == 0.5
    assert LearnedLoss(LossSettings(), WAYS, 2, 3).score_weight is None
    without = LearnedLoss(LossSettings(score_weight=0.5, transductive=False), WAYS, 2, 3)
    assert without.score_weight is None


def test_cross_entropy_is_torchs() -> None:
    logits, labels = make_items(7)
    expected = F.cross_entropy(logits, labels.argmax(-1), reduction="none")
    torch.testing.assert_close(cross_entropy(logits, labels), expected, rtol=0, atol=1e-12)
    assert torch.equal(one_hot(torch.tensor([2, 0]), 3, torch.float64), torch.eye(3, dtype=torch.float64)[[2, 0]])


@pytest.mark.parametrize("activation", ["identity", "smooth_leaky"])
@pytest.mark.parametrize("term", ["inductive", "transductive"])
def test_c23_a_loss_is_the_mean_over_its_items(term: str, activation: str) -> None:
    """Duplicating or permuting items changes nothing; more items enter through their mean alone."""
    loss = make_loss(activation=activation)
    items, more = (
        (make_items(4), make_items(6, seed=5))
        if term == "inductive"
        else (
            make_queries(4),
            make_queries(6, seed=5),
        )
    )

    def value(logits: Tensor, target: Tensor) -> Tensor:
        chosen = {
            "inductive": (logits, target, *make_queries()),
            "transductive": (*make_items(), logits, target),
        }[term]
        return loss.terms(*chosen, THETA)[term].detach()

    once, order = value(*items), torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(value(*(torch.cat([x, x]) for x in items)), once, rtol=0, atol=1e-10)
    torch.testing.assert_close(value(*(x[order] for x in items)), once, rtol=0, atol=1e-10)
    joined = value(*(torch.cat(pair) for pair in zip(items, more, strict=True)))
    torch.testing.assert_close(joined, (4 * once + 6 * value(*more)) / 10, rtol=0, atol=1e-10)


@pytest.mark.parametrize("film", [True, False])
def test_c2_a_silent_smooth_leaky_network_is_a_constant(film: bool) -> None:
    """Where the last layer is 0, the output is 3/4 softplus_5(0) = 3/20 ln 2 = 0.10397, and so is each item's."""
    network = randomised(LossNetwork(7, 5, film, "smooth_leaky"))
    silent = [network.layers[2], network.films[2]] if film else [network.layers[2]]
    for part in silent:
        for parameter in part.parameters():
            torch.nn.init.zeros_(parameter)
    assert network.mean_loss(numbers(4, 7)).item() == pytest.approx(0.15 * math.log(2), abs=1e-14)


def test_smooth_leaky_has_slope_five_eighths_at_zero_and_keeps_a_quarter_below() -> None:
    network = LossNetwork(1, 1, film=False, activation="smooth_leaky").double()
    for layer in network.layers:
        torch.nn.init.ones_(layer.weight)
        torch.nn.init.zeros_(layer.bias)

    def output(x: float) -> float:
        torch.nn.init.constant_(network.layers[2].bias, x)
        return network.mean_loss(torch.zeros(1, 1, dtype=torch.float64)).item()

    assert (output(1e-5) - output(-1e-5)) / 2e-5 == pytest.approx(0.625, abs=1e-8)
    assert output(-9.0) - output(-10.0) == pytest.approx(0.25, abs=1e-10)
    assert output(10.0) - output(9.0) == pytest.approx(1.0, abs=1e-10)


def test_averaged_statistics_divide_the_norms() -> None:
    exact, averaged = (tensor_statistics(THETA, LossSettings(averaged=on)) for on in (False, True))
    scale = torch.tensor([1, 1, 12, 12**0.5, 1, 1, 3, 3**0.5], dtype=torch.float64)
    torch.testing.assert_close(averaged * scale, exact, rtol=0, atol=1e-10)


def test_the_reference_statistics_are_blind_to_mean_and_deviation_and_repeat_l2() -> None:
    theta = {"weight": THETA["weight"].clone().requires_grad_()}
    found = tensor_statistics(theta, LossSettings(statistics="reference"))
    assert found[2] == found[3]
    (blind,) = torch.autograd.grad(found[0] + found[1], theta["weight"], retain_graph=True)
    assert blind.abs().max() == 0
    (gradient,) = torch.autograd.grad(found[3], theta["weight"])
    torch.testing.assert_close(gradient, THETA["weight"] / THETA["weight"].norm(), rtol=0, atol=1e-10)


def test_c27_the_regulariser_has_a_finite_meta_gradient_at_a_zero_bias(
    make_learner: Callable[..., Learner],
    make_task: Callable[..., Task],
    meta_gradient: Callable[..., dict[str, Tensor]],
) -> None:
    for averaged in (False, True):
        learner = make_learner(loss={"averaged": averaged})
        torch.nn.init.zeros_(learner.head.bias)
        gradient = meta_gradient(learner, [make_task()])
        assert all(value.isfinite().all() for value in gradient.values())


def test_c27_a_silent_regulariser_has_no_gradient_in_theta() -> None:
    loss = make_loss()

    def gradient() -> Tensor:
        g = torch.func.grad(lambda t: loss.terms(*make_items(), *make_queries(), t)["regulariser"])(THETA)
        return torch.cat([value.flatten() for value in g.values()])

    assert gradient().abs().max() > 1e-3
    for parameter in network_of(loss, "regulariser").parameters():
        torch.nn.init.zeros_(parameter)
    assert gradient().abs().max() == 0


def test_a_shared_network_serves_both_terms() -> None:
    loss = make_loss(share=True)
    assert loss.term("transductive") is loss.term("inductive") is not None
    assert not any("transductive" in name for name in loss.state_dict())
    logits, labels = make_items()
    terms = loss.terms(logits, labels, logits, labels, THETA)
    torch.testing.assert_close(terms["transductive"], terms["inductive"], rtol=0, atol=1e-12)
    own = make_loss().terms(logits, labels, logits, labels, THETA)
    assert (own["transductive"] - own["inductive"]).abs() > 1e-2


def test_class_weights_make_every_class_count_alike() -> None:
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 2])
    logits, target = numbers(7, WAYS), one_hot(labels, WAYS, torch.float64)
    each = cross_entropy(logits, target)
    base = make_loss(class_weights="classes").terms(logits, target, *make_queries(), THETA)["base"]
    by_class = torch.stack([each[labels == number].mean() for number in range(WAYS)])
    torch.testing.assert_close(base, by_class.mean(), rtol=0, atol=1e-12)
    assert (base - each.mean()).abs() > 1e-2


def test_class_weights_change_nothing_where_classes_have_as_many_items() -> None:
    arguments = (*make_items(2 * WAYS), *make_queries(), THETA)
    items, classes = (make_loss(class_weights=kind).terms(*arguments)["base"] for kind in ("items", "classes"))
    torch.testing.assert_close(classes, items, rtol=0, atol=1e-12)


@pytest.mark.parametrize("term", ["base", "inductive", "transductive", "regulariser"])
def test_a_term_that_is_off_is_not_there_and_the_others_keep_their_value(term: str) -> None:
    arguments = (*make_items(), *make_queries(), THETA)
    rest = make_loss(**{term: False}).terms(*arguments)
    full = make_loss().terms(*arguments)
    assert set(full) - set(rest) == {term}
    assert all(torch.equal(rest[name], full[name]) for name in rest)


@pytest.mark.parametrize(
    ("changes", "fixes"),
    [
        ({}, True),
        ({"inductive": False}, True),
        ({"inductive": False, "transductive": False}, False),
        ({"transductive": False}, True),
    ],
)
def test_networks_with_a_slot_for_each_class_fix_the_ways(changes: dict[str, Any], fixes: bool) -> None:
    assert LossSettings(**changes).fixes_ways is fixes
