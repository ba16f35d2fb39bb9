"""Laws C3 to C13 and C16 on whole learners: each system is MAML where its own part does nothing, and only there.

The parts have their own tests beside them; here they stand in the inner loop of a network on images.
"""

import math
from collections.abc import Callable
from typing import Any

import higher
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npbml.learner.learner import Learner
from npbml.methods import BUILT_IN
from npbml.rule.objective import Outer, multi_step_weights, outer_at
from npbml.rule.precondition import ContextMask, Diagonal
from npbml.rule.settings import OuterSettings
from npbml.settings import flat, merged
from npbml.tasks import Task

MakeLearner = Callable[..., Learner]
MakeTask = Callable[..., Task]
MetaGradient = Callable[..., dict[str, Tensor]]

INVERSE = math.log(math.expm1(2)) / 2  # softplus_2 of it is 1
CONV = "network.tail.blocks.{}.unit.conv.weight"
# The whole of a conv4 without a stem adapts by plain SGD on the support batch, as in the line of MAML.
WHOLE: dict[str, Any] = {
    "net": {"filters": 3, "frozen_blocks": 0, "affine": "meta"},
    "head": {"kind": "linear"},
    "warp": {"kind": "none"},
    "inner": {"steps": 2, "lr": 0.05, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0, "batch": "support"},
}


@pytest.fixture
def method(make_learner: MakeLearner) -> Callable[..., Learner]:
    """method(name, **changes) -> a tiny learner of that recipe, all of whose network adapts"""

    def make(name: str, size: int = 16, **changes: Any) -> Learner:
        rule = merged(WHOLE, BUILT_IN[name].rule)
        if rule["warp"]["kind"] == "fixed":
            rule["warp"] = {"kind": "none"}
        return make_learner(size=size, **merged(rule, changes))

    return make


@pytest.fixture
def task(make_task: MakeTask) -> Task:
    return make_task(shots=2, queries=2, size=16)


def seen(images: Tensor) -> Tensor:
    """As networks take them: normalised."""
    return (images - 0.5) / 0.25


def share(learner: Learner, other: Learner) -> Learner:
    """`learner` with every tensor of `other` that it has too."""
    mine, theirs = learner.state_dict(), other.state_dict()
    learner.load_state_dict({name: theirs.get(name, tensor) for name, tensor in mine.items()})
    return learner


def fill(learner: Learner, values: dict[str, float | Tensor]) -> None:
    """Set every parameter of the preconditioner whose name has one of these words."""
    with torch.no_grad():
        for word, value in values.items():
            found = [p for name, p in learner.named_parameters() if word in name and "precondition" in name]
            assert found, word
            for parameter in found:
                parameter.copy_(torch.as_tensor(value, dtype=parameter.dtype).expand_as(parameter))


def eye(learner: Learner) -> None:
    """Kronecker factors at the identity: matrices at I, vectors at 1."""
    with torch.no_grad():
        for name, parameter in learner.named_parameters():
            if name.startswith("precondition."):
                parameter.copy_(torch.eye(len(parameter)) if parameter.dim() == 2 else torch.ones_like(parameter))


def assert_learns_as(
    learner: Learner, other: Learner, task: Task, meta_gradient: MetaGradient, same: bool = True
) -> None:
    """Adapted parameters, query logits and the meta-gradient in what both have."""
    adapted, wanted = learner.adapt(task), other.adapt(task)
    mine, theirs = meta_gradient(learner, [task]), meta_gradient(other, [task])
    pairs = [(adapted[name], wanted[name]) for name in wanted]
    pairs += [(learner.predict(task), other.predict(task))]
    pairs += [(mine[name], theirs[name]) for name in theirs if name in mine]
    gaps = [(a - b).abs().max().item() for a, b in pairs]
    assert (max(gaps) < 1e-10) is same
    if not same:
        assert max(gaps) > 1e-6
    moved = [(wanted[name] - start).abs().max() for name, start in other.start(3).items()]
    assert max(moved) > 1e-3 and any(gradient.abs().max() > 1e-4 for gradient in theirs.values())


def test_the_meta_gradient_of_maml_is_that_of_higher(
    method: Callable[..., Learner], task: Task, meta_gradient: MetaGradient
) -> None:
    """Second order, to 1e-9, against another library on the same network and task."""
    learner = method("maml", inner={"steps": 5})

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(
                *(
                    nn.Sequential(
                        nn.Conv2d(2 if block == 0 else 3, 3, 3, padding=1, bias=False),
                        nn.BatchNorm2d(3, track_running_stats=False),
                        nn.ReLU(),
                        nn.MaxPool2d(2),
                    )
                    for block in range(4)
                )
            )
            self.head = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encoder(x).mean((2, 3)))

    net = Whole().double()
    state = learner.state_dict()
    names = {}
    for block in range(4):
        prefix = f"network.tail.blocks.{block}.unit."
        names[f"encoder.{block}.0.weight"] = prefix + "conv.weight"
        names[f"encoder.{block}.1.weight"] = prefix + "norm.weight"
        names[f"encoder.{block}.1.bias"] = prefix + "norm.bias"
    names |= {"head.weight": "head.weight", "head.bias": "head.bias"}
    net.load_state_dict({theirs: state[mine] for theirs, mine in names.items()})
    adapts = [p for name, p in net.named_parameters() if "norm" not in names[name]]
    with higher.innerloop_ctx(net, torch.optim.SGD(adapts, lr=0.05), copy_initial_weights=False) as (fnet, opt):
        for _ in range(5):
            opt.step(F.cross_entropy(fnet(seen(task.support_images)), task.support_labels))
        logits = fnet(seen(task.query_images))
        F.cross_entropy(logits, task.query_labels).backward()
    torch.testing.assert_close(learner.predict(task), logits.detach(), rtol=0, atol=1e-9)
    mine = meta_gradient(learner, [task])
    assert set(mine) == set(names.values())
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(mine[names[name]], parameter.grad, rtol=0, atol=1e-9)
        assert parameter.grad is not None and parameter.grad.abs().max() > 1e-6


def test_the_meta_gradient_of_metasgd_is_that_of_plain_autograd(
    method: Callable[..., Learner], task: Task, meta_gradient: MetaGradient
) -> None:
    learner = method("metasgd")
    state = {name: tensor.detach().clone().requires_grad_() for name, tensor in learner.named_parameters()}
    names = [*(CONV.format(block) for block in range(4)), "head.weight", "head.bias"]
    (part,) = learner.precondition.parts
    alphas = [state["precondition.parts.0.rate." + name.replace(".", "-")] for name in names]
    assert isinstance(part, Diagonal) and len(list(part.parameters())) == len(names)

    def logits(theta: list[Tensor], x: Tensor) -> Tensor:
        for block in range(4):
            norm = f"network.tail.blocks.{block}.unit.norm."
            x = F.conv2d(x, theta[block], padding=1)
            x = F.batch_norm(x, None, None, state[norm + "weight"], state[norm + "bias"], training=True)
            x = F.max_pool2d(x.relu(), 2)
        return x.mean((2, 3)) @ theta[4].T + theta[5]

    theta = [state[name] for name in names]
    for _ in range(2):
        loss = F.cross_entropy(logits(theta, seen(task.support_images)), task.support_labels)
        gradients = torch.autograd.grad(loss, theta, create_graph=True)
        theta = [t - alpha * g for t, alpha, g in zip(theta, alphas, gradients, strict=True)]
    F.cross_entropy(logits(theta, seen(task.query_images)), task.query_labels).backward()
    mine = meta_gradient(learner, [task])
    assert set(mine) == set(state)
    for name, parameter in state.items():
        torch.testing.assert_close(mine[name], parameter.grad, rtol=0, atol=1e-9)
        assert parameter.grad is not None and parameter.grad.abs().max() > 1e-6


@pytest.mark.parametrize(
    ("name", "quiet"),
    [
        ("metasgd", lambda learner: fill(learner, {"precondition": 0.05})),
        ("maml++", lambda learner: fill(learner, {"precondition": 0.05})),
        ("meta-curvature", eye),
        ("mtnet", lambda learner: fill(learner, {"precondition": 5.0})),
        ("gap", lambda learner: fill(learner, {"precondition": INVERSE})),
        ("gap-approx", lambda learner: fill(learner, {"precondition": INVERSE})),
    ],
)
def test_c3_c4_c5_c8_a_preconditioner_that_does_nothing_is_maml(
    method: Callable[..., Learner],
    task: Task,
    meta_gradient: MetaGradient,
    name: str,
    quiet: Callable[[Learner], None],
) -> None:
    changes: dict[str, Any] = {"outer": {"objective": "final"}}
    if name == "maml++":
        changes["net"] = {"per_step_norm": False}
    learner = method(name, **changes)
    maml = method("tnet" if name == "mtnet" else "maml")
    assert_learns_as(share(learner, maml), maml, task, meta_gradient, same=False)
    quiet(learner)
    assert_learns_as(learner, maml, task, meta_gradient)


def test_c4_alfa_with_a_generator_of_ones_is_rates_with_decay(
    method: Callable[..., Learner], task: Task, meta_gradient: MetaGradient
) -> None:
    """(1 - a lambda) theta - a g, which is SGD with weight decay lambda."""
    alfa = method("alfa")
    sgd = share(method("maml", inner={"weight_decay": 0.3}), alfa)
    assert_learns_as(alfa, sgd, task, meta_gradient, same=False)
    names = [name for name, _ in alfa.named_parameters() if name.startswith("precondition.")]
    generator = [name for name in names if name.rpartition(".")[2] in ("weight", "bias")]
    rates, decays = (name for name in names if name not in generator)
    with torch.no_grad():
        for name in generator:
            ones = name == generator[-1]
            assert not ones or name.endswith("bias")
            alfa.get_parameter(name).fill_(1.0 if ones else 0.0)
        alfa.get_parameter(rates).fill_(0.05)
        alfa.get_parameter(decays).fill_(0.05 * 0.3)
    assert_learns_as(alfa, sgd, task, meta_gradient)


def test_c6_tnet_with_identities_is_maml(
    method: Callable[..., Learner], task: Task, meta_gradient: MetaGradient
) -> None:
    maml = method("maml")
    tnet = share(method("tnet"), maml)
    assert_learns_as(tnet, maml, task, meta_gradient, same=False)
    omegas = list(tnet.groups()["omega"])
    assert len(omegas) == 5 and "head.warp" in omegas
    with torch.no_grad():
        for name in omegas:
            omega = tnet.get_parameter(name)
            omega.copy_(torch.eye(3).view_as(omega))
    assert_learns_as(tnet, maml, task, meta_gradient)


def test_c6_a_step_of_tnet_moves_the_composed_head_by_t_t_transposed(
    method: Callable[..., Learner], task: Task
) -> None:
    """Logits are T (W z + b): in the composed A = T W, a step is -a T T^t grad_A."""
    learner = method("tnet", inner={"steps": 1, "layers": "head"}, warp={"kind": "fixed", "blocks": "last"})
    t, weight, bias = learner.head.warp, learner.head.weight.detach(), learner.head.bias.detach()
    assert t is not None
    t = t.detach()
    embeddings = learner.network(seen(task.support_images)).detach()
    composed = [(t @ weight).requires_grad_(), (t @ bias).requires_grad_()]
    loss = F.cross_entropy(embeddings @ composed[0].T + composed[1], task.support_labels)
    gradient = torch.autograd.grad(loss, composed)
    adapted = learner.adapt(task)
    torch.testing.assert_close(
        t @ adapted["head.weight"], composed[0] - 0.05 * t @ t.T @ gradient[0], rtol=0, atol=1e-12
    )
    torch.testing.assert_close(
        t @ adapted["head.bias"], composed[1] - 0.05 * t @ t.T @ gradient[1], rtol=0, atol=1e-12
    )


def test_c9_modgrad_with_a_mask_of_one_is_sgd_on_its_blocks(
    method: Callable[..., Learner], task: Task, meta_gradient: MetaGradient
) -> None:
    modgrad = method("modgrad", inner={"last_blocks": 2})
    maml = share(method("maml", inner={"layers": "body", "last_blocks": 2}), modgrad)
    assert list(modgrad.start(3)) == [CONV.format(2), CONV.format(3)]
    assert_learns_as(modgrad, maml, task, meta_gradient, same=False)
    modgrad.precondition.begin(0.0, torch.Generator())
    (part,) = modgrad.precondition.parts
    assert isinstance(part, ContextMask)
    assert_learns_as(modgrad, maml, task, meta_gradient)


def parts_of(learner: Learner, task: Task) -> dict[str, bool]:
    """Whether head and blocks of the network are bit-identical before and after adaptation."""
    start, adapted = learner.start(3), learner.adapt(task)
    everything = {name: p for name, p in learner.named_parameters() if name.startswith(("network.", "head."))}
    same = {name: name not in adapted or torch.equal(adapted[name], start[name]) for name in everything}
    words = {"head": "head.", **{f"block {i}": f"blocks.{i}." for i in range(4)}}
    return {key: all(same[name] for name in same if word in name) for key, word in words.items()}


@pytest.mark.parametrize(
    ("name", "changes", "kept"),
    [
        ("boil", {}, {"head"}),
        ("anil", {}, {"block 0", "block 1", "block 2", "block 3"}),
        ("maml", {"inner": {"last_blocks": 1}}, {"block 0", "block 1", "block 2"}),
        ("modgrad", {"inner": {"last_blocks": 2}}, {"head", "block 0", "block 1"}),
        ("maml", {}, set()),
    ],
)
def test_c10_what_does_not_adapt_is_bit_identical(
    method: Callable[..., Learner], task: Task, name: str, changes: dict[str, Any], kept: set[str]
) -> None:
    same = parts_of(method(name, **changes), task)
    assert {part for part, is_same in same.items() if is_same} == kept


def test_c10_the_prediction_of_boil_uses_the_head_that_it_keeps(
    method: Callable[..., Learner], task: Task
) -> None:
    learner = method("boil")
    before = learner.predict(task)
    with torch.no_grad():
        learner.head.bias += torch.tensor([0.0, 3.0, 0.0])
    assert (learner.predict(task)[:, 1] - before[:, 1]).mean() > 1


def query_gradient(learner: Learner, task: Task, outer: Outer) -> dict[str, Tensor]:
    prepared = learner.prepare(task)
    loss = learner.task_loss(prepared, task.query_labels, outer)
    names, parameters = zip(*learner.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return dict(zip(names, found, strict=True))


FINAL = Outer(2, {-1: 1.0})


@pytest.mark.parametrize("steps", [1, 3])
def test_c11_one_step_ahead_of_one_point_is_the_unrolled_gradient(
    method: Callable[..., Learner], task: Task, steps: int
) -> None:
    """Of omega where J = 1; of theta always."""
    ahead = method("warpgrad", inner={"steps": steps})
    unrolled = share(method("warpgrad", inner={"steps": steps}, outer={"objective": "final"}), ahead)
    mine, theirs = query_gradient(ahead, task, FINAL), query_gradient(unrolled, task, FINAL)
    groups = ahead.groups()
    assert groups["omega"]
    gaps = {name: (mine[name] - theirs[name]).abs().max().item() for name in groups["omega"]}
    assert (max(gaps.values()) < 1e-10) is (steps == 1)
    for name in groups["theta"]:
        torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=1e-10)
    assert all(theirs[name].abs().max() > 1e-6 for name in theirs)


def test_c11_the_trajectory_objective_is_a_sum_of_steps_ahead_of_points_that_are_held(
    method: Callable[..., Learner], task: Task
) -> None:
    learner = method("warpgrad", inner={"steps": 3})
    prepared = learner.prepare(task)
    visited = [{n: t.detach() for n, t in theta.items()} for theta in learner.trajectory(prepared)[:-1]]
    names, omega = zip(*learner.groups()["omega"].items(), strict=True)
    total = torch.zeros((), dtype=torch.float64)
    for theta in visited:
        point = {name: tensor.requires_grad_() for name, tensor in theta.items()}
        logits = learner._forward(point, prepared.inner, None)
        loss = F.cross_entropy(logits, task.support_labels)
        gradient = torch.autograd.grad(loss, list(point.values()), create_graph=True)
        there = {name: point[name] - 0.05 * g for name, g in zip(point, gradient, strict=True)}
        total = total + F.cross_entropy(learner._forward(there, prepared.final, None), task.query_labels)
    expected = torch.autograd.grad(total, omega)
    mine = query_gradient(learner, task, FINAL)
    for name, gradient in zip(names, expected, strict=True):
        torch.testing.assert_close(mine[name], gradient, rtol=0, atol=1e-10)


def test_c11_without_the_hessian_the_step_ahead_is_a_constant(method: Callable[..., Learner], task: Task) -> None:
    free = method("warpgrad", inner={"steps": 1}, outer={"hessian_free": True})
    full = share(method("warpgrad", inner={"steps": 1}), free)
    prepared = free.prepare(task)
    there = {name: tensor.detach() for name, tensor in free.trajectory(prepared)[-1].items()}
    omega = list(free.groups()["omega"].values())
    loss = F.cross_entropy(free._forward(there, prepared.final, None), task.query_labels)
    mine = query_gradient(free, task, FINAL)
    for name, gradient in zip(free.groups()["omega"], torch.autograd.grad(loss, omega), strict=True):
        torch.testing.assert_close(mine[name], gradient, rtol=0, atol=1e-12)
    other = query_gradient(full, task, FINAL)
    assert any((mine[name] - other[name]).abs().max() > 1e-6 for name in free.groups()["omega"])


def test_c12_with_a_zero_critic_before_is_after(method: Callable[..., Learner], task: Task) -> None:
    sca = method("sca")
    prepared = sca.prepare(task)
    assert sca.loss.critic is not None
    loud = sca.trajectory(prepared)
    assert len(loud) == 2 + 1 + 1
    assert any((loud[-1][name] - loud[-2][name]).abs().max() > 1e-6 for name in loud[-1])
    with torch.no_grad():
        last = [part for part in sca.loss.critic.modules() if isinstance(part, nn.Linear)][-1]
        last.weight.zero_()
    quiet = sca.trajectory(prepared)
    assert all(torch.equal(quiet[-1][name], quiet[-2][name]) for name in quiet[-1])


def test_c12_the_critic_steps_on_the_query_predictions_with_the_first_rates(
    method: Callable[..., Learner], task: Task
) -> None:
    sca = method("sca")
    prepared = sca.prepare(task)
    *_, before, after = sca.trajectory(prepared)
    theta = {name: tensor.detach().requires_grad_() for name, tensor in before.items()}
    assert sca.loss.critic is not None
    loss = sca.loss.critic(sca._forward(theta, prepared.final, None, step=1))
    gradients = torch.autograd.grad(loss, list(theta.values()))
    (part,) = sca.precondition.parts
    rates = next(iter(part.parameters()))
    for row, (name, gradient) in enumerate(zip(theta, gradients, strict=True)):
        rate = rates[row, 0] if rates.shape[0] == len(theta) else rates[0, row]
        torch.testing.assert_close(after[name], before[name] - rate * gradient, rtol=0, atol=1e-12)


def test_c12_the_outer_weights_of_sca_sum_to_one_and_end_after_the_critic() -> None:
    settings = OuterSettings(objective="pre_post", epochs=150)
    for epoch in range(150):
        weights = outer_at(settings, 5, (epoch + 0.5) / 150).weights
        assert weights == {5: pytest.approx(0.5 - (epoch + 1) / 300), -1: pytest.approx(0.5 + (epoch + 1) / 300)}
        assert sum(weights.values()) == pytest.approx(1, abs=1e-12)
    assert outer_at(settings, 5, 1.0).weights == {5: pytest.approx(0, abs=1e-12), -1: pytest.approx(1)}


def test_c12_metal_without_loss_networks_is_maml_on_the_joint_batch(
    method: Callable[..., Learner], task: Task, meta_gradient: MetaGradient
) -> None:
    """... scored on support and query; the adapters do nothing at k = c = 0."""
    metal = method("metal")
    joint = {"inner": {"batch": "joint", "final_batch": "joint"}, "outer": {"items": "all"}}
    maml = share(method("maml", **joint), metal)
    assert_learns_as(metal, maml, task, meta_gradient, same=False)
    before = metal.predict(task)
    scales = [
        name for name, p in metal.named_parameters() if "adaptive" in name and p.numel() == 4 and p.dim() == 1
    ]
    assert scales
    with torch.no_grad():
        for name in scales:
            metal.get_parameter(name).zero_()
        inert = metal.predict(task)
        assert (inert - before).abs().max() > 1e-9
        for name, parameter in metal.named_parameters():
            if "adaptive" in name:
                parameter.zero_()
    assert_learns_as(metal, maml, task, meta_gradient)


@pytest.mark.parametrize("items", ["query", "all"])
def test_c12_the_outer_loss_of_metal_is_over_support_and_query(
    method: Callable[..., Learner], task: Task, items: str
) -> None:
    learner = method("metal", outer={"items": items})
    prepared = learner.prepare(task)
    logits = learner._forward(learner.adapt(task), prepared.final, None, step=1)
    labels = torch.cat([task.support_labels, task.query_labels])[-len(logits) if items == "all" else 6 :]
    expected = F.cross_entropy(logits[-len(labels) :], labels)
    torch.testing.assert_close(learner.meta_loss([task]), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_c13_multi_step_weights(steps: int) -> None:
    """Uniform at first, a sum of 1 always, and never below a floor of 0.03 / J."""
    # Of 100 epochs, the last three are at the floor.
    for epoch, epochs in [*((epoch, 15) for epoch in range(15)), *((epoch, 100) for epoch in range(100))]:
        weights = multi_step_weights(steps, epoch, epochs)
        assert len(weights) == steps and sum(weights) == pytest.approx(1, abs=1e-12)
        for early in weights[:-1]:
            assert early == pytest.approx(max(1 / steps - epoch / (steps * epochs), 0.03 / steps), abs=1e-12)
        last = min(1 / steps + epoch * (steps - 1) / (steps * epochs), 1 - (steps - 1) * 0.03 / steps)
        assert weights[-1] == pytest.approx(last, abs=1e-12)
    assert multi_step_weights(steps, 0, 15) == pytest.approx([1 / steps] * steps)
    settings = OuterSettings(objective="multi_step")
    assert outer_at(settings, steps, 0.149).weights == dict(enumerate(multi_step_weights(steps, 14, 15), 1))
    assert outer_at(settings, steps, 0.151).weights == {-1: 1.0}


def test_c13_the_multi_step_loss_is_the_weighted_sum_of_the_query_losses(
    method: Callable[..., Learner], task: Task
) -> None:
    """... each with the batch norm of the step before it."""
    learner = method("maml++", inner={"steps": 3})
    prepared = learner.prepare(task)
    weights = {1: 0.5, 2: 0.2, 3: 0.3}
    expected = torch.zeros((), dtype=torch.float64)
    trajectory = learner.trajectory(prepared)
    for place, weight in weights.items():
        tail, theta = learner.network.tail, trajectory[place]
        own = {name.removeprefix("network.tail."): value for name, value in theta.items() if "tail" in name}
        for name, parameter in tail.named_parameters():
            if "norm" in name:
                own[name] = parameter[place - 1]
        embeddings = torch.func.functional_call(tail, own, (prepared.final,))
        logits = embeddings @ theta["head.weight"].T + theta["head.bias"]
        expected = expected + weight * F.cross_entropy(logits, task.query_labels)
    found = learner.task_loss(prepared, task.query_labels, Outer(2, weights))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_every_step_has_its_own_batch_norm(method: Callable[..., Learner], task: Task) -> None:
    """Equal rows are one affine; a row changes what comes after its step, and nothing before."""
    learner = method("maml++", inner={"steps": 3})
    before = learner.trajectory(learner.prepare(task))
    norms = [p for name, p in learner.named_parameters() if "norm" in name]
    assert norms and all(p.shape == (3, 3) for p in norms)
    with torch.no_grad():
        for parameter in norms:
            parameter[1] += 0.3
    after = learner.trajectory(learner.prepare(task))
    same = [all(torch.equal(a[name], b[name]) for name in a) for a, b in zip(before, after, strict=True)]
    assert same == [True, True, False, False]


def test_c16_fomaml_is_the_query_gradient_at_the_end(
    method: Callable[..., Learner], task: Task, meta_gradient: MetaGradient
) -> None:
    learner, maml = method("fomaml"), method("maml")
    prepared = learner.prepare(task)
    end = {name: tensor.detach().requires_grad_() for name, tensor in learner.adapt(task).items()}
    loss = F.cross_entropy(learner._forward(end, prepared.final, None), task.query_labels)
    at_end = dict(zip(end, torch.autograd.grad(loss, list(end.values())), strict=True))
    first, second = meta_gradient(learner, [task]), meta_gradient(maml, [task])
    for name, gradient in at_end.items():
        torch.testing.assert_close(first[name], gradient, rtol=0, atol=1e-12)
    assert any((first[name] - second[name]).abs().max() > 1e-4 for name in at_end)


def test_c16_unicorn_maml_rebuilds_its_vector_from_every_class(
    method: Callable[..., Learner], task: Task, meta_gradient: MetaGradient
) -> None:
    """First order: w has the sum of the classes' query gradients, which cross-entropy alone makes 0 (C19)."""
    learner = method("unicorn-maml")
    assert learner.settings.outer.order == 1 and learner.head.weight.shape[0] == 1
    assert meta_gradient(learner, [task])["head.weight"].abs().max() < 1e-12


def test_more_steps_at_test_are_a_longer_trajectory(method: Callable[..., Learner], task: Task) -> None:
    short, long = method("maml"), method("maml", inner={"test_steps": 4})
    four = method("maml", inner={"steps": 4})
    assert torch.equal(long.predict(task), four.predict(task))
    assert torch.equal(long.meta_loss([task]), short.meta_loss([task]))
    assert not torch.equal(long.predict(task), short.predict(task))


def test_mtnet_has_one_mask_for_all_steps_of_a_task(method: Callable[..., Learner], task: Task) -> None:
    """A unit whose mask is 0 does not move at all; one whose mask is 1 moves as in tnet."""
    learner = method("mtnet", inner={"steps": 3})
    noise = torch.linspace(0.05, 0.95, learner.precondition.noise, dtype=torch.float64)
    prepared = learner.prepare(task)._replace(noise=noise)
    start, *_, end = learner.trajectory(prepared)
    stayed = 0
    for name in start:
        rows = (
            (end[name] - start[name]).flatten(1).abs().amax(1)
            if start[name].dim() > 1
            else end[name] - start[name]
        )
        stayed += int((rows == 0).sum())
    assert 0 < stayed < sum(len(tensor) for tensor in start.values())
    other = learner.trajectory(prepared._replace(noise=noise.flip(0)))[-1]
    assert any(not torch.equal(other[name], end[name]) for name in end)


def test_recipes_are_told_apart_by_what_they_compute(method: Callable[..., Learner], task: Task) -> None:
    """No two systems adapt alike, unless their rules are the same or differ in the outer loop alone."""
    seen: dict[str, Tensor] = {}
    for name, recipe in BUILT_IN.items():
        if name.startswith("npbml") or "outer.order" in flat(recipe.rule):
            continue
        logits = method(name, loss={"hidden": 4}).predict(task)
        for other, theirs in seen.items():
            assert (logits - theirs).abs().max() > 1e-6, (name, other)
        seen[name] = logits
    assert len(seen) == 16
