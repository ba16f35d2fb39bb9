"""Class-symmetric forms of the parts of other methods: law N1 of docs/laws.md, and what each form is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from npbml.errors import DataError, SettingError
from npbml.learner.learner import Learner
from npbml.methods import BUILT_IN
from npbml.parts import PRECONDITIONERS
from npbml.randomness import generator
from npbml.rule.adaptive import SymmetricAdaptiveQuery, SymmetricAdaptiveSupport
from npbml.rule.critic import SymmetricCritic
from npbml.rule.loss import Items, Sizes
from npbml.rule.pairs import pair_inputs
from npbml.rule.settings import LossSettings
from npbml.settings import merged
from npbml.tasks import Task

NO_FORM = {"boil", "modgrad"}  # a head that does not adapt
SLOTTED = {"npbml", "npbml-quirks", *(f"npbml-{number}" for number in (3, 4, 5, 7, 8, 10))}  # L^S or L^Q
COUNTING = [
    "metasgd",
    "tnet",
    "mtnet",
    "sca",
    "meta-curvature",
    "metal",
]  # whose form differs from the slotted one
SYMMETRIC = [name for name in BUILT_IN if name not in NO_FORM | SLOTTED]
SMALL: dict[str, Any] = {"net": {"filters": 3}, "size": 16}
MODGRAD: dict[str, Any] = {"precondition": {"chain": ["context_mask"]}}  # its mask on an adapted head

Make = Callable[..., Learner]
MakeTask = Callable[..., Task]


@pytest.fixture
def make(make_learner: Make) -> Make:
    """make("metal", symmetric=..., shaken=..., **changes) -> a tiny learner of that method, for 3 ways"""

    def learner(method: str, symmetric: bool = True, shaken: bool = True, **changes: Any) -> Learner:
        settings = merged(BUILT_IN[method].rule, SMALL, changes)
        return make_learner(symmetric=symmetric, shaken=shaken, **settings)

    return learner


@pytest.fixture
def small_task(make_task: MakeTask) -> MakeTask:
    def task(ways: int = 3, seed: int = 0) -> Task:
        return make_task(seed=seed, ways=ways, shots=1, queries=2, size=16)

    return task


def renamed(task: Task, order: Tensor) -> Task:
    """The same task with class c called order[c]."""
    return task._replace(support_labels=order[task.support_labels], query_labels=order[task.query_labels])


def numbers(*shape: int, seed: str = "") -> Tensor:
    return torch.randn(shape, generator=generator(0, "numbers", seed), dtype=torch.float64)


def moved(module: Any) -> Any:
    """Every tensor of a module away from its start."""
    module = module.double()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(0.5 * numbers(*parameter.shape, seed=name))
    return module


# Any number of classes, and none of them preferred


def check_n1(learner: Learner, task: Task, ways: int) -> None:
    order = torch.randperm(ways, generator=torch.Generator().manual_seed(ways))
    logits, others = learner.predict(task), learner.predict(renamed(task, order))
    torch.testing.assert_close(others[:, order], logits, rtol=0, atol=1e-9)
    assert logits.shape == (2 * ways, ways) and logits.std() > 1e-3  # it has something to say


@pytest.mark.parametrize("method", SYMMETRIC)
@pytest.mark.parametrize("ways", [2, 3, 5, 7])
def test_n1_renaming_the_classes_renames_the_logits(
    make: Make, small_task: MakeTask, method: str, ways: int
) -> None:
    check_n1(make(method), small_task(ways), ways)


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("metal", {"loss": {"balanced": True}}),
        ("sca", {"loss": {"balanced": True}}),
        ("maml", MODGRAD),
        ("npbml-sym", {"precondition": {"chain": ["kronecker", "unit_mask"]}, "warp": {"head": True}}),
    ],
)
@pytest.mark.parametrize("ways", [2, 4])
def test_n1_holds_for_other_mixtures(
    make: Make, small_task: MakeTask, method: str, changes: dict[str, Any], ways: int
) -> None:
    check_n1(make(method, **changes), small_task(ways), ways)


@pytest.mark.parametrize("method", COUNTING)
def test_without_the_switch_a_method_takes_one_number_of_classes(
    make: Make, small_task: MakeTask, method: str
) -> None:
    task, order = small_task(), torch.tensor([1, 2, 0])
    learner = make(method, symmetric=False)
    assert (learner.predict(renamed(task, order))[:, order] - learner.predict(task)).abs().max() > 1e-6
    with pytest.raises(DataError, match="slot for each of 3 classes"):
        learner.predict(small_task(4))


@pytest.mark.parametrize("method", SYMMETRIC)
@pytest.mark.parametrize("shaken", [True, False])
def test_every_group_has_a_finite_meta_gradient(
    make: Make, small_task: MakeTask, method: str, shaken: bool
) -> None:
    """Also from the start, where all classes have the same logits."""
    learner = make(method, shaken=shaken)
    learner.meta_loss([small_task(4), small_task(4, seed=1)], progress=0.02).backward()
    for letter, part in learner.groups().items():
        gradients = [p.grad for p in part.values() if p.grad is not None]
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert any(gradient.any() for gradient in gradients) or not part, letter


@pytest.mark.parametrize("method", COUNTING)
def test_c30_tasks_together_are_tasks_one_by_one(make: Make, small_task: MakeTask, method: str) -> None:
    learner, tasks = make(method, shaken=False), [small_task(4), small_task(4, seed=1)]
    single = learner.for_single_tasks()
    alone = [single.task_loss(single.prepare(task), task.query_labels) for task in tasks]
    torch.testing.assert_close(learner.meta_loss(tasks), torch.stack(alone).mean(), rtol=1e-10, atol=1e-10)


# What a form is: the part itself, with parameters that are the same for every class


@pytest.mark.parametrize(
    ("method", "changes"),
    [*((name, {}) for name in ("metasgd", "tnet", "mtnet", "meta-curvature")), ("maml", MODGRAD)],
)
def test_a_form_starts_as_the_slotted_one(
    make: Make, small_task: MakeTask, method: str, changes: dict[str, Any]
) -> None:
    one, other = (make(method, symmetric=on, shaken=False, **changes) for on in (True, False))
    torch.testing.assert_close(one.predict(small_task()), other.predict(small_task()), rtol=0, atol=1e-12)


def test_c3_the_diagonal_starts_as_maml(make: Make, small_task: MakeTask) -> None:
    inner = {"lr": 0.0625}  # exact in single precision, which parameters are made in
    one, other = (make(name, shaken=False, inner=inner).predict(small_task(4)) for name in ("metasgd", "maml"))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def spread(factors: Tensor, ways: int) -> Tensor:
    """a I + (b / ways) 11^T"""
    return factors[0] * torch.eye(ways, dtype=factors.dtype) + factors[1] / ways


@pytest.mark.parametrize("method", ["metasgd", "meta-curvature", "tnet"])
def test_a_form_is_the_slotted_one_with_equal_parameters(make: Make, small_task: MakeTask, method: str) -> None:
    symmetric, slotted = make(method), make(method, symmetric=False)
    state = symmetric.state_dict()
    assert state.keys() == slotted.state_dict().keys()
    wide = {}
    for name, value in slotted.state_dict().items():
        own = state[name]
        of_pair = own.shape == (2,) and value.shape == (3, 3)
        wide[name] = spread(own, 3) if of_pair else own.expand_as(value)
    assert sum(value.shape != state[name].shape for name, value in wide.items()) == (1 if method == "tnet" else 2)
    slotted.load_state_dict(wide)
    torch.testing.assert_close(symmetric.predict(small_task()), slotted.predict(small_task()), rtol=0, atol=1e-10)


def test_the_symmetric_masks_leave_the_head_alone(make: Make) -> None:
    learner = make("mtnet")
    units = sum(len(tensor) for name, tensor in learner.start(3).items() if name.endswith("weight")) - 3
    assert learner.precondition.noise == units == len(learner.get_parameter("precondition.parts.0.zeta"))
    assert make("mtnet", symmetric=False).precondition.noise == units + 3


def test_a_silent_critic_and_silent_losses_change_nothing(make: Make, small_task: MakeTask) -> None:
    """C12 for the symmetric forms."""
    for method, like in (("sca", "maml++"), ("metal", "maml")):
        inner = {**BUILT_IN[method].rule.get("inner", {}), "weight_decay": 0.0}  # a critic's step decays too
        learner, plain, task = make(method, inner=inner), make(like, inner=inner), small_task(4)
        plain.head.load_state_dict(learner.head.state_dict())  # drawn after the loss
        before = learner.predict(task)
        with torch.no_grad():
            for name, parameter in learner.loss.named_parameters():
                if name.startswith("critic.layers.2") or ".last." in name or name.endswith(".c"):
                    parameter.zero_()
        torch.testing.assert_close(learner.predict(task), plain.predict(task), rtol=0, atol=1e-12)
        assert (before - plain.predict(task)).abs().max() > 1e-6


# What the networks see


def test_a_pair_without_a_target_has_all_inputs_but_label_and_loss() -> None:
    logits, target, loss = numbers(4, 3), numbers(4, 3, seed="target"), numbers(4, seed="loss")
    for balanced in (False, True):
        full = pair_inputs(logits, target, loss, balanced)
        kept = [i for i in range(full.shape[-1]) if i not in (3, 4)]
        assert torch.equal(pair_inputs(logits, balanced=balanced), full[..., kept])


def test_the_critic_is_its_equation() -> None:
    """(1 / m) sum_i sum_c c(x_ic)"""
    critic, logits = moved(SymmetricCritic()), numbers(4, 3)
    (w1, b1), (w2, b2), (w3, b3) = ((layer.weight, layer.bias) for layer in critic.layers)
    pairs = pair_inputs(logits).flatten(0, 1)
    assert w1.shape == (16, 6) and w2.shape == (16, 16) and len(pairs) == 12
    expected = sum(w3 @ (w2 @ (w1 @ x + b1).relu() + b2).relu() + b3 for x in pairs)[0] / 4
    torch.testing.assert_close(critic(logits), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(critic(torch.cat([logits, logits])), expected, rtol=0, atol=1e-10)


def test_metals_losses_are_their_equations() -> None:
    """x_ic: the state, and the inputs of the pair; all standardised together."""
    theta = {"weight": numbers(3, 2, seed="w"), "bias": numbers(3, seed="b")}
    support, query, labels = numbers(5, 3), numbers(4, 3, seed="query"), F.one_hot(torch.arange(5) % 3).double()
    base = F.cross_entropy(support, labels, reduction="none")
    items = Items(support, labels, query, query.new_zeros(4, 0), theta, 1, base)
    means = [theta["weight"].mean(), theta["bias"].mean()]

    def standard(x: Tensor) -> Tensor:
        return (x - x.mean()) / x.std()

    def check(term: Any, state: list[Tensor], pairs: Tensor, adapter_sees: Tensor | None) -> None:
        seen = standard(torch.cat([torch.stack(state).expand(*pairs.shape[:2], -1), pairs], -1))
        told = seen.mean((0, 1)) if adapter_sees is None else adapter_sees
        value = term(items)
        assert value.shape == ()
        expected = sum(term[1](seen[i, c], told) for i in range(len(seen)) for c in range(3)) / len(seen)
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-8)

    sizes, settings = Sizes(3, 2, 2), LossSettings()
    state = [base.mean(), *means]
    check(
        moved(SymmetricAdaptiveSupport(sizes, settings)),
        state,
        pair_inputs(support, labels, base),
        standard(torch.stack(state)),
    )
    check(moved(SymmetricAdaptiveQuery(sizes, settings)), means, pair_inputs(query), None)


# What is refused


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("boil", {}, "inner.layers=body needs one, as its head does not adapt"),
        ("modgrad", {}, "inner.layers=body needs one, as its head does not adapt"),
        ("maml", {"head": {"kind": "linear"}}, "set head.kind=unicorn"),
        ("npbml", {}, "set loss.inductive=false and loss.symmetric_support=true"),
        ("npbml-8", {}, "set loss.transductive=false and loss.symmetric_query=true"),
        ("anil", {"precondition": {"chain": ["unit_mask"]}}, "masks no unit of the head, and nothing else adapts"),
        ("maml", {"target": "values"}, "target=values has none"),
    ],
)
def test_what_has_no_symmetric_form_is_refused_with_the_reason(
    make: Make, method: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingError, match=message):
        make(method, **changes)


@pytest.mark.parametrize("method", sorted(NO_FORM | SLOTTED))
def test_methods_without_a_symmetric_form_are_these(make: Make, method: str) -> None:
    with pytest.raises(SettingError, match=r"has a (row|slot) for each class"):
        make(method)


def test_a_part_of_ones_own_that_counts_rows_needs_a_form_of_its_own(
    make: Make, small_task: MakeTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PRECONDITIONERS, "parts", dict(PRECONDITIONERS.parts))
    diagonal = PRECONDITIONERS.get("diagonal")

    @PRECONDITIONERS("mine", sets_rate=True)
    class Mine(diagonal):  # type: ignore[misc, valid-type]
        pass

    with pytest.raises(SettingError, match="mine, which counts the head's rows and has no symmetric form"):
        make("maml", precondition={"chain": ["mine"]})
    PRECONDITIONERS.register("with-form", Mine, symmetric=diagonal)
    check_n1(make("maml", precondition={"chain": ["with-form"]}), small_task(4), 4)
