"""Laws C3, C4, C5, C8 and C9: what each preconditioner does to the gradient, and where it is plain SGD."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from npbml.errors import SettingError
from npbml.parts import PRECONDITIONERS
from npbml.randomness import generator
from npbml.rule import precondition
from npbml.rule.descend import Parameters, Point
from npbml.rule.precondition import ALFA_DECAY, CONTEXT, MIXTURE, Precondition
from npbml.rule.settings import PreconditionSettings, check_precondition
from npbml.settings import check

RATE = 0.125  # exact in single precision, which parameters are made in
STEPS = 3
SHAPES = {
    "wide.weight": torch.Size((3, 2, 2, 3)),
    "wide.bias": torch.Size((3,)),
    "tall.weight": torch.Size((5, 1, 1, 2)),
    "head.weight": torch.Size((4, 3)),
    "head.bias": torch.Size((4,)),
}
KINDS = tuple(PRECONDITIONERS)


def numbers(*shape: int, seed: Any = 0) -> Tensor:
    return torch.randn(shape, generator=generator(0, "numbers", repr(seed)), dtype=torch.float64)


def tensors(seed: Any = 0, *leading: int) -> Parameters:
    return {name: numbers(*leading, *shape, seed=(name, seed)) for name, shape in SHAPES.items()}


def make(
    *chain: str, shapes: dict[str, torch.Size] = SHAPES, shaken: bool = True, seed: int = 0, **settings: Any
) -> Any:
    """A chain, as it starts or with every parameter moved by noise."""
    rule = Precondition(PreconditionSettings(chain, **settings), shapes, STEPS, RATE).double()
    rule.begin(0.01, generator(seed, "rule"))
    if shaken:
        with torch.no_grad():
            for name, tensor in rule.named_parameters():
                tensor.add_(0.5 * numbers(*tensor.shape, seed=name))
    return rule


def loss(theta: Parameters, target: Tensor | float = 0.3) -> Tensor:
    """Smooth, and every tensor sees every other."""
    flat = torch.cat([tensor.flatten() for tensor in theta.values()])
    weights = torch.arange(2.0, 2.0 + len(flat), dtype=flat.dtype).sin()
    return 0.1 * ((flat - target).square() + flat.sin()).sum() + (0.2 * weights @ flat).sin()


def at(seed: int = 1, step: int = 0) -> Point:
    return Point(tensors(seed), step, loss, torch.sigmoid(numbers(12, seed=("noise", seed))))


def close(one: Parameters, other: Parameters, atol: float = 1e-10) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=atol)


def times(factor: float, direction: Parameters) -> Parameters:
    return {name: factor * g for name, g in direction.items()}


def fill(parameters: Iterable[Tensor], value: float) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.fill_(value)


def test_the_constants_are_the_authors() -> None:
    assert ALFA_DECAY == 5e-4
    assert (CONTEXT, precondition.PASSES, MIXTURE) == (300, 2, 5)


# Where the rules are plain SGD


def test_c3_without_parts_the_step_is_the_rate_times_the_gradient() -> None:
    close(make()(tensors(), at()), times(RATE, tensors()), 0)


@pytest.mark.parametrize("kind", ["rates", "diagonal", "kronecker", "context_mask"])
@pytest.mark.parametrize("step", range(STEPS))
def test_c3_c4_c5_c9_a_rule_starts_as_plain_sgd(kind: str, step: int) -> None:
    close(make(kind, shaken=False)(tensors(), at(step=step)), times(RATE, tensors()), 1e-15)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rule_away_from_its_start_is_not_plain_sgd(kind: str) -> None:
    """So that the laws above say something."""
    step = make(kind)(tensors(), at())
    assert any((step[name] - RATE * g).abs().max() > 1e-3 for name, g in tensors().items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_has_the_tensors_of_the_direction(kind: str) -> None:
    step = make(kind)(tensors(), at())
    assert {name: tensor.shape for name, tensor in step.items()} == SHAPES


# Meta-SGD


def test_c3_the_diagonal_is_a_diagonal_matrix() -> None:
    rule, direction = make("diagonal"), tensors()
    step = rule(direction, at())
    for name, g in direction.items():
        alpha = rule.parts[0].rate[name.replace(".", "-")]
        expected = torch.diag(alpha.flatten()) @ g.flatten()
        torch.testing.assert_close(step[name].flatten(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["diagonal", "kronecker"])
def test_c3_a_multiple_of_the_identity_is_a_rate(kind: str) -> None:
    rule = make(kind, shaken=False)
    with torch.no_grad():
        for name, tensor in rule.named_parameters():
            tensor *= 1.0 if name.endswith(("-i", "-f")) else 3.0
    close(rule(tensors(), at()), times(3 * RATE, tensors()), 1e-12)


def test_meta_sgd_starts_uniformly() -> None:
    rates = make("diagonal", shaken=False, uniform=True, shapes={"a.weight": torch.Size((100, 100))})
    alpha = rates.parts[0].rate["a-weight"]
    assert 0.005 <= alpha.min() < 0.006
    assert 0.099 < alpha.max() <= 0.1
    assert abs(alpha.mean() - 0.0525) < 0.001


# LSLR and ALFA


def test_c4_every_tensor_and_step_has_its_own_rate() -> None:
    rule = make("rates", shaken=False)
    with torch.no_grad():
        rule.parts[0].rate.copy_(torch.arange(15.0).view(STEPS, 5))
    for step in range(STEPS):
        expected = {name: (5 * step + index) * g for index, (name, g) in enumerate(tensors().items())}
        close(rule(tensors(), at(step=step)), expected, 1e-12)


def test_c4_a_rate_belongs_to_a_name() -> None:
    rule, direction = make("rates"), tensors()
    backwards = dict(reversed(direction.items()))
    close(rule(backwards, at()), rule(direction, at()), 0)


def unit_output(rule: Any) -> None:
    fill(rule.parts[0].h.parameters(), 0.0)
    fill([rule.parts[0].h[2].bias], 1.0)


@pytest.mark.parametrize("step", range(STEPS))
def test_c4_generated_with_unit_output_is_rates_with_decay(step: int) -> None:
    rule, rates = make("generated"), make("rates")
    unit_output(rule)
    with torch.no_grad():
        rates.parts[0].rate.copy_(rule.parts[0].rate)
    point = at(step=step)
    decay = dict(zip(SHAPES, rule.parts[0].decay[step], strict=True))
    plain = rates(tensors(), point)
    close(rule(tensors(), point), {name: plain[name] + decay[name] * point.theta[name] for name in SHAPES})


def test_c4_generated_starts_as_sgd_with_decay() -> None:
    """theta <- (1 - a lambda) theta - a g"""
    rule, point = make("generated", shaken=False), at()
    step = rule(tensors(), point)
    stepped = {name: theta - step[name] for name, theta in point.theta.items()}
    expected = {
        name: (1 - RATE * ALFA_DECAY) * theta - RATE * tensors()[name] for name, theta in point.theta.items()
    }
    close(stepped, expected, 1e-3)
    unit_output(rule)
    step = rule(tensors(), point)
    close({name: theta - step[name] for name, theta in point.theta.items()}, expected)


def test_c4_generated_reads_the_means_of_weights_and_gradients() -> None:
    rule, direction, point = make("generated"), tensors(), at(step=1)
    part = rule.parts[0]
    tau = torch.stack([point.theta[n].mean() for n in SHAPES] + [direction[n].mean() for n in SHAPES])
    hidden = (part.h[0].weight @ tau + part.h[0].bias).clamp(min=0)
    output = part.h[2].weight @ hidden + part.h[2].bias
    expected = {}
    for index, name in enumerate(SHAPES):
        gradient = output[index] * part.rate[1, index] * direction[name]
        expected[name] = gradient + output[5 + index] * part.decay[1, index] * point.theta[name]
    close(rule(direction, point), expected, 1e-12)


def test_c4_only_the_gradients_part_of_the_state_is_constant() -> None:
    rule = make("generated")
    direction = {name: g.requires_grad_() for name, g in tensors().items()}
    theta = {name: t.requires_grad_() for name, t in tensors(1).items()}
    step = rule(direction, at()._replace(theta=theta))
    (through_direction,) = torch.autograd.grad(step["head.bias"].sum(), direction["head.bias"], retain_graph=True)
    assert (through_direction - through_direction[0]).abs().max() == 0  # alpha A, and no path through the mean
    other = torch.autograd.grad(
        step["head.bias"].sum(), [direction["wide.bias"], theta["wide.bias"]], allow_unused=True
    )
    assert other[0] is None
    assert other[1].abs().max() > 0


# Meta-Curvature


def factors(rule: Any, name: str) -> list[Tensor]:
    held = rule.parts[0].factors
    return [held[key] for key in (f"{name}-{mode}" for mode in "oif") if key in held]


@pytest.mark.parametrize("name", ["wide.weight", "tall.weight", "head.weight"])
def test_c5_kronecker_multiplies_the_vector_by_the_product_of_its_factors(name: str) -> None:
    rule, g = make("kronecker"), tensors()[name]
    held = factors(rule, name.replace(".", "-"))
    assert [len(factor) for factor in held] == ([*g.shape[:2], g[0, 0].numel()] if g.dim() == 4 else list(g.shape))
    product = held[0]
    for factor in held[1:]:
        product = torch.kron(product, factor)
    expected = RATE * product @ g.flatten()
    torch.testing.assert_close(rule(tensors(), at())[name].flatten(), expected, rtol=0, atol=1e-10)


def test_c5_a_vector_is_scaled_entry_by_entry() -> None:
    rule, g = make("kronecker"), tensors()["head.bias"]
    expected = RATE * rule.parts[0].factors["head-bias"] * g
    torch.testing.assert_close(rule(tensors(), at())["head.bias"], expected, rtol=0, atol=1e-12)


def test_c5_mode_products_commute() -> None:
    """One rule that holds all factors is three rules that hold one each, in any order."""
    together = make("kronecker")
    alone = []
    for mode in "oif":
        rule = make("kronecker", shaken=False)
        with torch.no_grad():
            for name, tensor in rule.named_parameters():
                if name.endswith("-" + mode):
                    tensor.copy_(together.get_parameter(name))
        alone.append(rule)
    kernels = ("wide.weight", "tall.weight", "head.weight")
    expected = {name: together(tensors(), at())[name] for name in kernels}
    for order in itertools.permutations(alone):
        direction = tensors()
        for rule in order:
            direction = times(1 / RATE, rule(direction, at()))
        close(times(RATE, {name: direction[name] for name in kernels}), expected)


def test_c5_diagonal_factors_give_a_separable_diagonal() -> None:
    rule, g = make("kronecker"), tensors()["wide.weight"]
    o, i, f = numbers(3, seed="o"), numbers(2, seed="i"), numbers(6, seed="f")
    with torch.no_grad():
        for factor, diagonal in zip(factors(rule, "wide-weight"), (o, i, f), strict=True):
            factor.copy_(torch.diag(diagonal))
    alpha = torch.einsum("o,i,f->oif", o, i, f).view_as(g)
    torch.testing.assert_close(rule(tensors(), at())["wide.weight"], RATE * alpha * g, rtol=0, atol=1e-10)


# GAP

KERNELS = ("wide.weight", "tall.weight")


def scales(rule: Any, name: str) -> Tensor:
    return F.softplus(rule.parts[0].m[name.replace(".", "-")], beta=2)


def inverse_softplus(s: float) -> float:
    return float(torch.tensor(2 * s, dtype=torch.float64).expm1().log() / 2)


@pytest.mark.parametrize("name", KERNELS)
def test_c8_svd_scales_the_singular_values(name: str) -> None:
    """P G = U diag(s .* S) V^t"""
    rule, g = make("svd"), tensors()[name]
    u, s, vh = torch.linalg.svd(g.flatten(1), full_matrices=False)
    assert len(scales(rule, name)) == len(s)
    expected = RATE * (u * (scales(rule, name) * s)) @ vh
    torch.testing.assert_close(rule(tensors(), at())[name].flatten(1), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["svd", "svd_approx"])
def test_c8_unit_scales_leave_the_gradient(kind: str) -> None:
    """Also where G is tall and U U^t is no identity: it projects on the span of G."""
    rule = make(kind)
    fill(rule.parameters(), inverse_softplus(1.0))
    close(rule(tensors(), at()), times(RATE, tensors()))


@pytest.mark.parametrize("kind", ["svd", "svd_approx"])
def test_c8_scales_start_at_one(kind: str) -> None:
    rule = make(kind, shaken=False)
    for name in KERNELS:
        assert (scales(rule, name) - 1).abs().max() < 1e-3
    close(rule(tensors(), at()), times(RATE, tensors()), 1e-3)


@pytest.mark.parametrize("kind", ["svd", "svd_approx"])
def test_c8_only_kernels_are_scaled(kind: str) -> None:
    rule = make(kind)
    step = rule(tensors(), at())
    assert len(list(rule.parameters())) == len(KERNELS)
    for name in set(SHAPES) - set(KERNELS):
        assert torch.equal(step[name], RATE * tensors()[name])


def derivative(rule: Any, name: str) -> tuple[Tensor, Tensor]:
    """The derivative of a kernel's step in its direction, [rows, columns, rows, columns], and the matrix P."""
    shape = SHAPES[name]

    def step(g: Tensor) -> Tensor:
        return rule({**tensors(), name: g.view(shape)}, at())[name].flatten(1) / RATE

    g = tensors()[name].flatten(1)
    u = torch.linalg.svd(g, full_matrices=False).U
    return torch.func.jacrev(step)(g).detach(), (u * scales(rule, name) @ u.T).detach()


@pytest.mark.parametrize("name", KERNELS)
def test_c8_no_gradient_passes_through_the_singular_vectors(name: str) -> None:
    """With U constant the rule is linear in G: its derivative is P for every column, symmetric and >= 0."""
    jacobian, p = derivative(make("svd"), name)
    columns = jacobian.shape[1]
    expected = torch.einsum("ao,bi->aboi", p, torch.eye(columns, dtype=torch.float64))
    torch.testing.assert_close(jacobian, expected, rtol=0, atol=1e-10)
    matrix = jacobian[:, 0, :, 0]
    torch.testing.assert_close(matrix, matrix.T, rtol=0, atol=1e-12)
    assert torch.linalg.eigvalsh(matrix).min() > -1e-12


def test_c8_the_approximation_scales_the_shorter_side() -> None:
    rule, direction = make("svd_approx"), tensors()
    step = rule(direction, at())
    wide = RATE * torch.diag(scales(rule, "wide.weight")) @ direction["wide.weight"].flatten(1)
    tall = RATE * direction["tall.weight"].flatten(1) @ torch.diag(scales(rule, "tall.weight"))
    torch.testing.assert_close(step["wide.weight"].flatten(1), wide, rtol=0, atol=1e-12)
    torch.testing.assert_close(step["tall.weight"].flatten(1), tall, rtol=0, atol=1e-12)


def test_c8_the_approximation_scales_the_rows_of_a_square() -> None:
    rule, g = make("svd_approx", shapes={"square.weight": torch.Size((4, 1, 2, 2))}), numbers(4, 1, 2, 2)
    step = rule({"square.weight": g}, at())["square.weight"]
    expected = RATE * torch.diag(scales(rule, "square.weight")) @ g.flatten(1)
    torch.testing.assert_close(step.flatten(1), expected, rtol=0, atol=1e-12)


# MT-Net


def ones() -> Parameters:
    return {name: torch.ones(shape, dtype=torch.float64) for name, shape in SHAPES.items()}


def test_unit_masks_are_hard_and_shared_by_weight_and_bias() -> None:
    rule = make("unit_mask")
    for seed in range(5):
        mask = times(1 / RATE, rule(ones(), at(seed)))
        for weight in mask.values():
            assert ((weight == 0) | (weight == 1)).all()
            rows = weight.view(len(weight), -1)
            assert (rows == rows[:, :1]).all()
        for name in ("wide", "head"):
            assert torch.equal(mask[f"{name}.weight"].flatten(1)[:, 0], mask[f"{name}.bias"])


def test_unit_masks_follow_the_noise_in_the_order_of_the_layers() -> None:
    """u above sigmoid(-zeta) switches a unit on."""
    rule, point = make("unit_mask"), at()
    mask = times(1 / RATE, rule(ones(), point))
    units = torch.cat([mask["wide.bias"], mask["tall.weight"][:, 0, 0, 0], mask["head.bias"]])
    assert torch.equal(units == 1, point.noise > torch.sigmoid(-rule.parts[0].zeta))
    assert 0 < units.sum() < 12


def test_unit_masks_let_the_gradient_of_the_soft_mask_through() -> None:
    rule, point, weights = make("unit_mask"), at(), tensors(2)
    zeta = rule.parts[0].zeta
    step = rule(tensors(), point)
    (gradient,) = torch.autograd.grad(sum((step[n] * weights[n]).sum() for n in SHAPES), zeta)

    u = point.noise
    soft = torch.sigmoid(zeta + torch.log(u / (1 - u)))
    parts = dict(zip(("wide", "tall", "head"), soft.split([3, 5, 4]), strict=True))
    total = torch.zeros((), dtype=torch.float64)
    for name, g in tensors().items():
        rows = (RATE * g * weights[name]).view(len(g), -1).sum(1)
        total = total + parts[name.partition(".")[0]] @ rows
    (expected,) = torch.autograd.grad(total, zeta)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
    assert gradient.abs().min() > 0


def test_units_are_on_as_often_as_their_logits_say() -> None:
    rule, point = make("unit_mask"), at()
    assert torch.equal(make("unit_mask", shaken=False).parts[0].zeta, torch.zeros(12, dtype=torch.float64))
    noise = torch.rand(20_000, 12, generator=generator(0, "draws"), dtype=torch.float64)
    masks = torch.vmap(lambda u: rule(ones(), point._replace(noise=u)))(noise)
    frequency = torch.cat([masks["wide.bias"], masks["tall.weight"][:, :, 0, 0, 0], masks["head.bias"]], 1).mean(0)
    torch.testing.assert_close(frequency / RATE, torch.sigmoid(rule.parts[0].zeta), rtol=0, atol=0.015)


# ModGrad


def vector(rule: Any, name: str, z: Tensor) -> Tensor:
    """The mixture by hand."""
    part, count = rule.parts[0].vectors[name], MIXTURE
    hidden = (part.hidden.weight @ z + part.hidden.bias).clamp(min=0)
    output = part.output.weight @ hidden + part.output.bias
    weights, candidates = output[:count].exp(), output[count:].view(count, -1)
    return (weights[:, None] * candidates).sum(0) / weights.sum()


def masks(rule: Any, z: Tensor) -> Parameters:
    """Every mask by hand, entry by entry."""
    result = {}
    for name, shape in SHAPES.items():
        key = name.replace(".", "-")
        if len(shape) == 1:
            result[name] = vector(rule, f"{key}-b", z).clamp(min=0)
            continue
        rows, columns = shape[2:] or (1, 1)
        u, v = vector(rule, f"{key}-u", z), vector(rule, f"{key}-v", z)
        entries = [
            u[f * rows + a] * v[c * columns + b]
            for f, c, a, b in itertools.product(range(shape[0]), range(shape[1]), range(rows), range(columns))
        ]
        result[name] = torch.stack(entries).view(shape).clamp(min=0)
    return result


def masked(rule: Any, direction: Parameters, z: Tensor) -> Parameters:
    return {name: mask * direction[name] for name, mask in masks(rule, z).items()}


def test_c9_one_pass_uses_the_mask_of_the_zero_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precondition, "PASSES", 1)
    rule = make("context_mask")
    zero = torch.zeros(CONTEXT, dtype=torch.float64)
    close(rule(tensors(), at()), times(RATE, masked(rule, tensors(), zero)), 1e-12)


@pytest.mark.parametrize("passes", [2, 3])
def test_c9_each_further_pass_replaces_the_context_by_a_look_ahead(
    monkeypatch: pytest.MonkeyPatch, passes: int
) -> None:
    monkeypatch.setattr(precondition, "PASSES", passes)
    rule, direction, point = make("context_mask"), tensors(), at()
    z = torch.zeros(CONTEXT, dtype=torch.float64)
    for _ in range(passes - 1):
        z = z.detach().requires_grad_()
        ahead = times(RATE, masked(rule, direction, z))
        (gradient,) = torch.autograd.grad(loss({n: point.theta[n] - ahead[n] for n in SHAPES}), z)
        z = -gradient
    assert z.abs().max() > 1e-3
    close(rule(direction, point), times(RATE, masked(rule, direction, z)))


def test_c9_the_look_ahead_leaves_what_has_no_direction_alone() -> None:
    """Tensors that do not move are still seen by the loss."""
    rule = make("context_mask")
    direction = {name: g for name, g in tensors().items() if name.startswith("wide")}
    still = {name: torch.zeros_like(g) for name, g in tensors().items() if name not in direction}
    expected = rule({**direction, **still}, at())
    close(rule(direction, at()), {name: expected[name] for name in direction}, 1e-12)


def test_c9_a_mask_has_rank_one_before_its_relu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the ReLU cutting, the mask laid out as (f, a) x (c, b) has one singular value."""
    monkeypatch.setattr(precondition, "PASSES", 1)
    rule = make("context_mask")
    with torch.no_grad():
        for name, parameter in rule.named_parameters():
            if name.endswith("output.bias"):
                parameter[MIXTURE:] += 5  # all candidates positive
    mask = times(1 / RATE, rule(ones(), at()))["wide.weight"]
    values = torch.linalg.svdvals(mask.permute(0, 2, 1, 3).reshape(6, 6))
    assert mask.min() > 0
    assert values[0] > 1
    assert values[1] < 1e-12
    assert torch.linalg.svdvals(mask.flatten(1))[1] > 1e-3  # other layouts have more


def test_c9_masks_are_never_negative_and_cut() -> None:
    mask = make("context_mask")(ones(), at())
    entries = torch.cat([tensor.flatten() for tensor in mask.values()])
    assert entries.min() == 0
    assert 0 < (entries == 0).sum() < len(entries)


def test_c9_the_context_learns_from_the_start() -> None:
    """The rule starts as SGD, but no generator starts dead: a meta-step or two, and all their weights move."""
    # With the few hidden units of these small tensors, a draw may still silence all of a generator: not this one.
    rule = make("context_mask", shaken=False, seed=3)
    optimiser = torch.optim.SGD(rule.parameters(), 0.1)
    before = {name: tensor.detach().clone() for name, tensor in rule.named_parameters()}
    for seed in range(3):
        optimiser.zero_grad()
        point = at(seed)
        step = rule(torch.func.grad(loss)(point.theta), point)
        loss({name: point.theta[name] - step[name] for name in SHAPES}).backward()
        optimiser.step()
    for name, tensor in rule.named_parameters():
        assert not torch.equal(tensor, before[name]), name


# Chains


@pytest.mark.parametrize("chain", [("svd", "kronecker"), ("kronecker", "svd"), ("unit_mask", "svd", "rates")])
def test_a_chain_is_applied_in_its_order(chain: tuple[str, ...]) -> None:
    rule, direction, point = make(*chain), tensors(), at()
    for part in rule.parts:
        direction = part(direction, point)
    rate = 1.0 if "rates" in chain else RATE
    close(rule(tensors(), point), times(rate, direction), 1e-12)
    assert [type(part) for part in rule.parts] == [PRECONDITIONERS.get(kind) for kind in chain]


def test_the_order_of_a_chain_matters() -> None:
    one, other = make("svd", "kronecker"), make("kronecker", "svd")
    other.parts[0].load_state_dict(one.parts[1].state_dict())
    other.parts[1].load_state_dict(one.parts[0].state_dict())
    first, second = one(tensors(), at()), other(tensors(), at())
    assert (first["wide.weight"] - second["wide.weight"]).abs().max() > 1e-3


def test_the_look_ahead_takes_the_rate_once() -> None:
    """After rates, the direction has its rate already; constant rates then change nothing."""
    plain, after = make("context_mask"), make("rates", "context_mask", shaken=False)
    after.parts[1].load_state_dict(plain.parts[0].state_dict())
    close(after(tensors(), at()), plain(tensors(), at()), 1e-12)


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        (("rates", "diagonal"), "rates and diagonal, and each sets the learning rate"),
        (("generated", "svd", "rates"), "generated and rates, and each sets the learning rate"),
        (("kronecker", "svd", "kronecker"), "kronecker more than once"),
        (("rates", "rates"), "rates more than once"),
        (("svd_approx", "svd"), "keep one"),
        (("unit_mask", "svd", "diagonal"), "put svd before unit_mask"),
        (("unit_mask", "diagonal", "svd_approx"), "put svd_approx before unit_mask"),
    ],
)
def test_chains_without_sense_are_refused(chain: tuple[str, ...], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        check_precondition(PreconditionSettings(chain))


@pytest.mark.parametrize("chain", [(), *((kind,) for kind in KINDS), ("svd", "unit_mask", "diagonal")])
def test_other_chains_pass(chain: tuple[str, ...]) -> None:
    check(PreconditionSettings(chain))
    check_precondition(PreconditionSettings(chain))


def test_a_rule_says_what_it_needs() -> None:
    body = {name: shape for name, shape in SHAPES.items() if not name.startswith("head")}
    assert {kind for kind in KINDS if make(kind).fixes_ways} == {
        "diagonal",
        "kronecker",
        "unit_mask",
        "context_mask",
    }
    assert not any(make(kind, shapes=body).fixes_ways for kind in KINDS)
    assert make("svd", "diagonal").fixes_ways
    assert not make().fixes_ways
    assert {kind for kind in KINDS if make(kind).per_step} == {"rates", "generated"}
    assert make("svd", "rates").per_step
    assert {kind: make(kind).noise for kind in KINDS if make(kind).noise} == {"unit_mask": 12}
    assert make("svd", "unit_mask").noise == 12
    assert make().noise == 0


def test_begin_is_repeatable() -> None:
    for kind in KINDS:
        one, other = make(kind, shaken=False, uniform=True), make(kind, shaken=False, uniform=True)
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


# In an inner loop

CHAINS: list[tuple[str, ...]] = [
    *((kind,) for kind in KINDS),
    ("svd", "unit_mask", "kronecker", "generated"),
    ("svd_approx", "context_mask", "diagonal"),
]


def meta_loss(rule: Any, theta: Parameters, target: Tensor, noise: Tensor, steps: int = 2) -> Tensor:
    """The loss of another task after some steps on one."""

    def inner(theta: Parameters) -> Tensor:
        return loss(theta, target)

    for step in range(steps):
        change = rule(torch.func.grad(inner)(theta), Point(theta, step, inner, noise))
        theta = {name: theta[name] - change[name] for name in theta}
    return loss(theta, -1.0)


def gradients(value: Tensor, inputs: Iterable[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(value, list(inputs), allow_unused=True, materialize_grads=True))


@pytest.mark.parametrize("chain", CHAINS, ids="-".join)
def test_c30_tasks_together_are_tasks_one_by_one(chain: tuple[str, ...]) -> None:
    """Losses, and the meta-gradients of what the tasks share and of what each has."""
    rule, tasks = make(*chain), 3
    theta = {name: tensor.requires_grad_() for name, tensor in tensors(1, tasks).items()}
    target, noise = numbers(tasks, seed="target"), torch.sigmoid(numbers(tasks, rule.noise, seed="noise"))
    inputs = [*rule.parameters(), *theta.values()]

    def task(theta: Parameters, target: Tensor, noise: Tensor) -> Tensor:
        return meta_loss(rule, theta, target, noise)

    together = torch.vmap(task)(theta, target, noise)
    alone = torch.stack(
        [task({name: t[i] for name, t in theta.items()}, target[i], noise[i]) for i in range(tasks)]
    )
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-10)
    for one, other in zip(gradients(together.mean(), inputs), gradients(alone.mean(), inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def along(function: Callable[[], Tensor], inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """A derivative in a random direction: by autograd and by central differences."""
    way = [numbers(*tensor.shape, seed=("way", index)) for index, tensor in enumerate(inputs)]
    exact = sum((g * w).sum() for g, w in zip(gradients(function(), inputs), way, strict=True))
    values, size = [], 1e-5
    for sign in (1, -2):
        with torch.no_grad():
            for tensor, w in zip(inputs, way, strict=True):
                tensor += sign * size * w
        values.append(function().detach())
    return exact, (values[0] - values[1]) / (2 * size)  # type: ignore[return-value]


@pytest.mark.parametrize("chain", [("rates",), ("diagonal",), ("kronecker",), ("svd_approx",), ("context_mask",)])
def test_c17_meta_gradients_are_finite_differences(chain: tuple[str, ...]) -> None:
    """Through two steps: the second holds the derivative of the first one's gradient."""
    rule, theta = make(*chain), {name: t.requires_grad_() for name, t in tensors(1).items()}
    inputs = [*rule.parameters(), *theta.values()]
    target = torch.tensor(0.4, dtype=torch.float64)
    exact, difference = along(lambda: meta_loss(rule, theta, target, torch.zeros(0)), inputs)
    assert difference.abs() > 1e-2
    torch.testing.assert_close(exact, difference, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["svd", "generated"])
def test_c17_meta_gradients_of_rules_with_a_constant_are_finite_differences_in_one_step(kind: str) -> None:
    """In one step, what a rule holds constant does not depend on its own parameters."""
    rule, theta = make(kind), tensors(1)
    target = torch.tensor(0.4, dtype=torch.float64)
    inputs = list(rule.parameters())
    exact, difference = along(lambda: meta_loss(rule, theta, target, torch.zeros(0), steps=1), inputs)
    assert difference.abs() > 1e-2
    torch.testing.assert_close(exact, difference, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_has_a_meta_gradient(kind: str) -> None:
    rule = make(kind)
    noise = torch.sigmoid(numbers(rule.noise, seed="noise"))
    value = meta_loss(rule, tensors(1), torch.tensor(0.4, dtype=torch.float64), noise, STEPS)
    for (name, _), gradient in zip(rule.named_parameters(), gradients(value, rule.parameters()), strict=True):
        assert gradient.isfinite().all(), name
        assert gradient.abs().max() > 0, name


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_writes_on_nothing(kind: str) -> None:
    rule, direction, point = make(kind), tensors(), at()
    rule(direction, point)
    close(direction, tensors(), 0)
    close(point.theta, tensors(1), 0)
