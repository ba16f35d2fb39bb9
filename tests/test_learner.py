"""Laws C1, C2, C17, C18, C29 and C30, and the learner's promises to its user."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from npbml.errors import DataError, RunError, SettingError
from npbml.learner.build import encoder
from npbml.learner.learner import GROUPS, Learner
from npbml.learner.prepare import Counts, Prepared, normalised, prepare_tasks
from npbml.learner.settings import ImageSpec, LearnerSettings, scoring_encoder
from npbml.nets.layers import Norm, set_norm
from npbml.randomness import generator
from npbml.rule.loss import LossNetwork
from npbml.rule.modulate import FiLM
from npbml.rule.warp import Warp
from npbml.settings import from_dict
from npbml.tasks import Task, restack, stack_tasks

MakeLearner = Callable[..., Learner]
MakeTask = Callable[..., Task]
MetaGradient = Callable[..., dict[str, Tensor]]

CONV = "network.tail.blocks.0.unit.conv.weight"
MAML_LOSS = {"inductive": False, "transductive": False, "regulariser": False}
BACKBONES = pytest.mark.parametrize("backbone", ["conv4", "resnet12"])


def silence(learner: Learner) -> Learner:
    """The start that C1 speaks of: a Dirac warp, FiLMs at 0, the last linear layer of each loss network at 0."""
    for part in learner.modules():
        silent = []
        if isinstance(part, FiLM):
            silent = list(part.parameters())
        elif isinstance(part, LossNetwork):
            silent = list(part.layers[2].parameters())
        elif isinstance(part, Warp):
            torch.nn.init.dirac_(part.omega)
        for parameter in silent:
            torch.nn.init.zeros_(parameter)
    return learner


def with_values_of(learner: Learner, other: Learner) -> Learner:
    """`learner` with the tensors of `other`, which has all of them."""
    values = other.state_dict()
    learner.load_state_dict({name: values[name] for name in learner.state_dict()})
    return learner


def assert_same_learning(one: Learner, other: Learner, task: Task, meta_gradient: MetaGradient) -> None:
    """To the last bits: theta_J, the query logits, and the meta-gradient with respect to theta."""
    gradient, wanted = meta_gradient(one, [task]), meta_gradient(other, [task])
    pairs = [(one.predict(task), other.predict(task))]
    adapted, expected = one.adapt(task), other.adapt(task)
    assert adapted.keys() == expected.keys()
    pairs += [(adapted[name], expected[name]) for name in expected]
    pairs += [(gradient[name], wanted[name]) for name in other.groups()["theta"]]
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-14)
    # Both sides move: the law is not about two learners that stand still.
    start = other.start(3)
    for name in start:
        assert (expected[name] - start[name]).abs().max() > 1e-4
    encoder = [name for name in other.groups()["theta"] if not name.startswith("head.")]
    assert all(wanted[name].abs().max() > 1e-6 for name in encoder)


@BACKBONES
@pytest.mark.parametrize("shaken", [False, True])
@pytest.mark.parametrize("activation", ["identity", "smooth_leaky"])
def test_c1_c2_at_initialisation_npbml_learns_exactly_as_maml(
    make_learner: MakeLearner,
    make_task: MakeTask,
    meta_gradient: MetaGradient,
    backbone: str,
    shaken: bool,
    activation: str,
) -> None:
    """With nothing between theta and the head, MAML is the network without warp and FiLM, on cross-entropy."""
    same: dict[str, Any] = {"backbone": backbone, "shaken": shaken, "inner": {"steps": 3}}
    npbml = silence(make_learner(warp={"norm": False}, loss={"activation": activation}, **same))
    maml = make_learner(warp={"kind": "none"}, film={"enabled": False}, loss=MAML_LOSS, **same)
    assert_same_learning(npbml, with_values_of(maml, npbml), make_task(1), meta_gradient)


@BACKBONES
def test_c1_with_a_normalised_warp_npbml_learns_exactly_as_maml_in_the_same_network(
    make_learner: MakeLearner, make_task: MakeTask, meta_gradient: MetaGradient, backbone: str
) -> None:
    """As the paper compares them: the warp stands in MAML's network too, fixed at its Dirac start."""
    npbml = silence(make_learner(backbone=backbone))
    maml = make_learner(backbone=backbone, warp={"kind": "fixed"}, film={"enabled": False}, loss=MAML_LOSS)
    assert_same_learning(npbml, with_values_of(maml, npbml), make_task(), meta_gradient)


def test_c1_at_initialisation_npbml_is_maml_written_out(
    make_learner: MakeLearner, make_task: MakeTask, meta_gradient: MetaGradient
) -> None:
    """The same law against MAML in plain torch, which shares no line with the library."""
    learner, task = silence(make_learner(warp={"norm": False}, inner={"steps": 3})), make_task()
    state = {name: tensor.detach().clone() for name, tensor in learner.state_dict().items()}
    meta = {name: state[name].requires_grad_() for name in (CONV, "head.weight", "head.bias")}

    def block(prefix: str, weight: Tensor, x: Tensor) -> Tensor:
        scale, shift = state[prefix + "norm.weight"], state[prefix + "norm.bias"]
        y = F.batch_norm(F.conv2d(x, weight, padding=1), None, None, scale, shift, training=True)
        return F.max_pool2d(y.relu(), 2)

    def logits(theta: list[Tensor], x: Tensor) -> Tensor:
        for index in range(3):
            prefix = f"network.stem.blocks.{index}.unit."
            x = block(prefix, state[prefix + "conv.weight"], x)
        x = block("network.tail.blocks.0.unit.", theta[0], x)
        return x.mean((2, 3)) @ theta[1].T + theta[2]

    theta = [meta[CONV], meta["head.weight"].repeat(3, 1), meta["head.bias"].repeat(3)]
    buffer = [torch.zeros_like(tensor) for tensor in theta]
    joint, query_images = (
        (images - 0.5) / 0.25
        for images in (torch.cat([task.support_images, task.query_images]), task.query_images)
    )
    for _ in range(3):
        loss = F.cross_entropy(logits(theta, joint)[:6], task.support_labels)
        raw = torch.autograd.grad(loss, theta, create_graph=True)
        gradient = [g + 5e-4 * t for g, t in zip(raw, theta, strict=True)]
        buffer = [0.9 * b + g for b, g in zip(buffer, gradient, strict=True)]
        theta = [t - 0.05 * (g + 0.9 * b) for t, g, b in zip(theta, gradient, buffer, strict=True)]
    query = logits(theta, query_images)
    expected = torch.autograd.grad(F.cross_entropy(query, task.query_labels), list(meta.values()))

    adapted = list(learner.adapt(task).values())
    for mine, maml in zip(adapted, theta, strict=True):
        torch.testing.assert_close(mine, maml, rtol=0, atol=1e-14)
    torch.testing.assert_close(learner.predict(task), query, rtol=0, atol=1e-14)
    found = meta_gradient(learner, [task])
    for name, maml in zip(meta, expected, strict=True):
        torch.testing.assert_close(found[name], maml, rtol=0, atol=1e-14)
    assert found[CONV].abs().max() > 1e-6


def test_c1_away_from_initialisation_npbml_is_not_maml(make_learner: MakeLearner, make_task: MakeTask) -> None:
    npbml, task = make_learner(), make_task()
    maml = make_learner(warp={"kind": "fixed"}, film={"enabled": False}, loss=MAML_LOSS)
    assert (with_values_of(maml, npbml).predict(task) - npbml.predict(task)).abs().max() > 1e-2


SMOOTH = {"net": {"activation": "softplus"}}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "resnet12": {"backbone": "resnet12", "film": {"shortcut": True}},
    "task": {"film": {"conditioning": "batch", "refresh": "task"}},
    "film-adapted": {"film": {"adapt": True}},
    "soft": {"loss": {"target": "soft", "activation": "smooth_leaky", "averaged": True}},
    "linear-shared": {"head": {"kind": "linear"}, "loss": {"share": True}, "warp": {"kernel": 1}},
    "deep": {"net": {"frozen_blocks": 2, "activation": "softplus"}, "warp": {"position": "pre_activation"}},
    "joint": {"inner": {"final_batch": "joint", "nesterov": False}, "net": {"tail_norm": "running"}},
}


def slope(learner: Learner, tasks: list[Task], direction: dict[str, Tensor], step: float = 1e-5) -> float:
    """The central difference of the meta-loss along `direction`."""
    values, parameters = [], dict(learner.named_parameters())
    with torch.no_grad():
        for side in (step, -2 * step, step):
            values.append(learner.meta_loss(tasks).item())
            for name, move in direction.items():
                parameters[name].add_(side * move)
    return (values[1] - values[2]) / (2 * step)


def parts(learner: Learner) -> dict[str, list[str]]:
    """The names of the meta-parameters by group, the head's vector and bias apart from the encoder's theta."""
    groups = {letter: list(part) for letter, part in learner.groups().items()}
    groups["theta"] = [name for name in groups["theta"] if not name.startswith("head.")]
    return {**groups, "w": ["head.weight"], "b": ["head.bias"]}


@pytest.mark.parametrize("variant", VARIANTS)
def test_c17_finite_differences_along_a_direction_match_the_meta_gradient(
    make_learner: MakeLearner, make_task: MakeTask, meta_gradient: MetaGradient, variant: str
) -> None:
    learner = make_learner(**{**SMOOTH, **VARIANTS[variant]})
    tasks = [make_task(1), make_task(2)]
    gradient, shapes = meta_gradient(learner, tasks), dict(learner.named_parameters())
    for part, names in parts(learner).items():
        direction = {
            name: torch.randn(shapes[name].shape, generator=generator(0, part, name), dtype=torch.float64)
            for name in names
        }
        length = sum(move.square().sum() for move in direction.values()) ** 0.5
        direction = {name: move / length for name, move in direction.items()}
        expected = sum((gradient[name] * direction[name]).sum().item() for name in names)
        found = slope(learner, tasks, direction)
        assert found == pytest.approx(expected, rel=1e-6, abs=0), f"{part} of {variant}"


def test_c17_finite_differences_of_single_coordinates_match_the_meta_gradient(
    make_learner: MakeLearner, make_task: MakeTask, meta_gradient: MetaGradient
) -> None:
    learner, tasks = make_learner(**SMOOTH), [make_task(1)]
    gradient = meta_gradient(learner, tasks)
    for part, names in parts(learner).items():
        flat = torch.cat([gradient[name].flatten() for name in names])
        # Rounding leaves 1e-11 of a difference quotient: a relative error needs a gradient well above it.
        visible = (flat.abs() > 1e-3 * flat.abs().max()).nonzero().flatten()
        chosen = visible[torch.randperm(len(visible), generator=generator(1, part))[:4]]
        for place in chosen.tolist():
            direction, left = {}, place
            for name in names:
                if 0 <= left < gradient[name].numel():
                    direction[name] = torch.zeros_like(gradient[name])
                    direction[name].view(-1)[left] = 1.0
                left -= gradient[name].numel()
            found = slope(learner, tasks, direction)
            assert found == pytest.approx(flat[place].item(), rel=1e-6, abs=1e-10), f"{part}, {place}"


@BACKBONES
@pytest.mark.parametrize("frozen", [0, 3])
def test_c18_what_meta_learning_keeps_is_a_buffer(make_learner: MakeLearner, backbone: str, frozen: int) -> None:
    learner = make_learner(backbone=backbone, net={"frozen_blocks": frozen})
    assert list(learner.network.stem.parameters()) == []
    assert learner.scorer is not None and list(learner.scorer.parameters()) == []
    norms = [part for part in learner.modules() if isinstance(part, Norm)]
    assert norms and not any(list(norm.parameters()) for norm in norms)
    kept = {name: value for name, value in learner.named_buffers() if name not in ("mean", "deviation")}
    assert len(kept) + len(list(learner.parameters())) == len(learner.state_dict())
    assert all(not tensor.requires_grad for tensor in kept.values())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"backbone": "resnet12", "film": {"shortcut": True}},
        {"loss": {"share": True}},
        {"loss": MAML_LOSS, "film": {"enabled": False}, "warp": {"kind": "fixed"}},
        {"film": {"adapt": True}, "head": {"kind": "linear"}},
    ],
)
def test_c18_the_groups_partition_the_parameters(make_learner: MakeLearner, changes: dict[str, Any]) -> None:
    learner = make_learner(**changes)
    groups = learner.groups()
    assert tuple(groups) == GROUPS
    names = [name for part in groups.values() for name in part]
    assert sorted(names) == sorted(name for name, _ in learner.named_parameters())
    for letter, part in groups.items():
        for name in part:
            belongs = (
                "psi" if "film" in name else "phi" if "loss." in name else "omega" if "omega" in name else "theta"
            )
            assert letter == belongs


@pytest.mark.parametrize(
    ("changes", "silent"),
    [
        ({"loss": {"transductive": False}}, "loss.transductive"),
        ({"loss": {"inductive": False}}, "loss.inductive"),
        ({"loss": {"regulariser": False}}, "loss.regulariser"),
        ({"film": {"enabled": False}}, "network.tail.blocks.0.unit.film"),
        ({"warp": {"kind": "fixed"}}, "omega"),
        ({"loss": {"film": False}}, "films"),
    ],
)
def test_c18_a_part_that_is_off_is_no_parameter_and_the_others_learn(
    make_learner: MakeLearner,
    make_task: MakeTask,
    meta_gradient: MetaGradient,
    changes: dict[str, Any],
    silent: str,
) -> None:
    gradient = meta_gradient(make_learner(**changes), [make_task()])
    assert not any(silent in name for name in gradient)
    # Without FiLM a loss network is linear between its kinks, where its biases have no part in its slope.
    learns = {name: value for name, value in gradient.items() if silent != "films" or "bias" not in name}
    assert all(value.abs().max() > 0 for value in learns.values())


def test_c18_every_part_of_the_full_method_learns(
    make_learner: MakeLearner, make_task: MakeTask, meta_gradient: MetaGradient
) -> None:
    for backbone in ("conv4", "resnet12"):
        gradient = meta_gradient(make_learner(backbone=backbone), [make_task()])
        assert all(value.abs().max() > 0 for value in gradient.values())


def full_forward(learner: Learner, theta: dict[str, Tensor], images: Tensor) -> Tensor:
    """Logits of images through the whole network, with nothing kept from before."""
    tail = {name.removeprefix("network."): value for name, value in theta.items() if name.startswith("network.")}
    seen = normalised(learner, images)
    return F.linear(functional_call(learner.network, tail, (seen,)), theta["head.weight"], theta["head.bias"])


@pytest.mark.parametrize("norm", ["batch", "running"])
@pytest.mark.parametrize("inner", ["joint", "support"])
@pytest.mark.parametrize("final", ["query", "joint"])
def test_c29_features_of_the_stem_give_the_logits_of_the_full_forward(
    make_learner: MakeLearner, make_task: MakeTask, norm: str, inner: str, final: str
) -> None:
    learner, task = (
        make_learner(
            net={"stem_norm": norm},
            inner={"batch": inner, "final_batch": final},
            loss={"transductive": inner == "joint"},
        ),
        make_task(),
    )
    prepared, theta = learner.prepare(task), learner.adapt(task)
    joint = torch.cat([task.support_images, task.query_images])
    batches = {"joint": joint, "support": task.support_images, "query": task.query_images}
    for features, batch in ((prepared.inner, inner), (prepared.final, final)):
        kept = learner._forward(theta, features, None)
        torch.testing.assert_close(kept, full_forward(learner, theta, batches[batch]), rtol=0, atol=1e-10)
    expected = full_forward(learner, theta, batches[final])[-6:]
    torch.testing.assert_close(learner.predict(task), expected, rtol=0, atol=1e-10)


def test_c29_only_batch_statistics_make_the_stem_see_the_batch(
    make_learner: MakeLearner, make_task: MakeTask
) -> None:
    task = make_task()
    for norm in ("batch", "running"):
        prepared = make_learner(net={"stem_norm": norm}).prepare(task)
        difference = (prepared.inner[6:] - prepared.final).abs().max()
        assert difference < 1e-12 if norm == "running" else difference > 1e-2


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"backbone": "resnet12"},
        {"film": {"conditioning": "batch", "refresh": "task"}},
        {"loss": {"target": "soft", "statistics": "reference"}, "head": {"kind": "linear"}},
        {"outer": {"order": 1}, "loss": MAML_LOSS},
    ],
)
def test_c30_tasks_together_are_tasks_one_by_one(
    make_learner: MakeLearner, make_task: MakeTask, meta_gradient: MetaGradient, changes: dict[str, Any]
) -> None:
    learner, tasks = make_learner(**changes), [make_task(seed) for seed in range(3)]
    single, gradient = learner.for_single_tasks(), meta_gradient(learner, tasks)
    assert learner.vmapped and not single.vmapped
    loss = torch.stack([single.task_loss(single.prepare(task), task.query_labels) for task in tasks]).mean()
    torch.testing.assert_close(learner.meta_loss(tasks), loss, rtol=0, atol=1e-10)
    names, parameters = zip(*learner.named_parameters(), strict=True)
    expected = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    for name, wanted in zip(names, expected, strict=True):
        torch.testing.assert_close(gradient[name], wanted, rtol=1e-10, atol=1e-10)


def test_c30_the_gradient_of_a_batch_is_the_mean_over_its_tasks(
    make_learner: MakeLearner, make_task: MakeTask, meta_gradient: MetaGradient
) -> None:
    learner, tasks = make_learner(), [make_task(seed) for seed in range(3)]
    each = [meta_gradient(learner, [task]) for task in tasks]
    batch = meta_gradient(learner, tasks)
    for name, gradient in batch.items():
        mean = sum(part[name] for part in each) / 3
        torch.testing.assert_close(gradient, mean, rtol=1e-10, atol=1e-10)
    losses = [F.cross_entropy(learner.predict(task), task.query_labels) for task in tasks]
    torch.testing.assert_close(learner.meta_loss(tasks), sum(losses) / 3, rtol=0, atol=1e-10)


@pytest.mark.parametrize("changes", [{}, {"scorer": {"combine": "mean"}, "net": {"stem_norm": "running"}}])
def test_c30_the_frozen_work_can_be_done_together_too(
    make_learner: MakeLearner, make_task: MakeTask, changes: dict[str, Any]
) -> None:
    learner, tasks = make_learner(**changes), [make_task(seed) for seed in range(3)]
    batch = stack_tasks(tasks)
    images = torch.cat([batch.support_images, batch.query_images], 1)
    counts = Counts.of_queries(batch.support_labels.shape[1], 6)

    def prepare(images: Tensor, labels: Tensor) -> Prepared:
        return Prepared(*(part[0] for part in prepare_tasks(learner, images[None], labels[None], counts, 3)))

    together = torch.vmap(prepare)(images, batch.support_labels)
    loop = restack([learner.prepare(task) for task in tasks])
    for mine, others, loops in zip(together, learner.prepare_batch(batch), loop, strict=True):
        torch.testing.assert_close(mine, loops, rtol=0, atol=1e-10)
        torch.testing.assert_close(others, loops, rtol=0, atol=1e-10)


def count(parameters: dict[str, torch.nn.Parameter], part: str = "") -> int:
    return sum(value.numel() for name, value in parameters.items() if part in name)


@pytest.mark.parametrize(
    ("backbone", "convs", "film", "omega", "warp_film", "head", "regulariser"),
    [
        ("conv4", 147_456, 33_024, 147_456, 33_024, 129, 6_603),
        ("resnet12", 6_029_312, 1_313_792, 2_359_296, 525_312, 513, 8_043),
    ],
)
def test_the_groups_have_the_sizes_of_the_paper(
    backbone: str, convs: int, film: int, omega: int, warp_film: int, head: int, regulariser: int
) -> None:
    settings = from_dict(LearnerSettings, {"backbone": backbone, "scorer": {"widths": [2]}})
    learner = Learner(settings, ImageSpec(3, 84, (0.5,) * 3, (0.5,) * 3))
    groups = learner.groups()
    everything = dict(learner.named_parameters())
    assert count(groups["theta"]) == convs + head and count(groups["theta"], "head.") == head
    assert count(groups["omega"]) == omega
    assert count(groups["psi"], "warp.film") == warp_film
    assert count(groups["psi"], "network.") == film + warp_film
    for name, size in (("inductive", 6_483), ("transductive", 6_483), ("regulariser", regulariser)):
        assert count(everything, f"loss.{name}.") == size
    assert count(groups["phi"]) + count(groups["psi"], "loss.") == 2 * 6_483 + regulariser
    loss_films = [f"loss.{name}.films" for name in ("inductive", "transductive", "regulariser")]
    assert count(groups["psi"], "loss.") == sum(count(everything, name) for name in loss_films)


def learning(learner: Learner, task: Task, meta_gradient: MetaGradient) -> tuple[Tensor, dict[str, Tensor]]:
    return learner.predict(task).detach(), meta_gradient(learner, [task])


CHANGES_PREDICTION: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"net": {"stem_norm": "running"}}),
    ({}, {"net": {"tail_norm": "running"}}),
    ({}, {"net": {"activation": "leaky_relu"}}),
    ({}, {"net": {"frozen_blocks": 2}}),
    ({"loss": {"transductive": False}}, {"inner": {"batch": "support"}}),
    ({}, {"inner": {"final_batch": "joint"}}),
    ({}, {"inner": {"steps": 3}}),
    ({}, {"inner": {"lr": 0.06}}),
    ({}, {"inner": {"momentum": 0.8}}),
    ({}, {"inner": {"nesterov": False}}),
    ({}, {"inner": {"weight_decay": 0.0}}),
    ({}, {"film": {"enabled": False}}),
    ({}, {"film": {"conditioning": "batch"}}),
    ({"film": {"conditioning": "batch"}}, {"film": {"refresh": "task"}}),
    ({"backbone": "resnet12"}, {"film": {"shortcut": True}}),
    ({}, {"film": {"adapt": True}}),
    ({}, {"warp": {"kind": "none"}}),
    ({}, {"warp": {"kernel": 1}}),
    ({}, {"warp": {"norm": False}}),
    ({}, {"warp": {"position": "pre_activation"}}),
    ({"backbone": "resnet12"}, {"warp": {"position": "after_block"}}),
    ({}, {"head": {"kind": "linear"}}),
    ({}, {"loss": {"base": False}}),
    ({}, {"loss": {"inductive": False}}),
    ({}, {"loss": {"transductive": False}}),
    ({}, {"loss": {"regulariser": False}}),
    ({}, {"loss": {"hidden": 6}}),
    ({}, {"loss": {"film": False}}),
    ({}, {"loss": {"inputs": "softmax"}}),
    ({}, {"loss": {"target": "soft"}}),
    ({}, {"loss": {"activation": "smooth_leaky"}}),
    ({}, {"loss": {"share": True}}),
    ({}, {"loss": {"statistics": "reference"}}),
    ({}, {"loss": {"averaged": True}}),
    ({}, {"scorer": {"combine": "mean"}}),
    ({}, {"scorer": {"pools": 2}}),
    ({}, {"scorer": {"widths": [2, 4]}}),
    ({}, {"init": {"std": 0.02}}),
    ({}, {"init": {"uniform_bias": True}}),
]


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    both = {**base, **changes}
    return {
        name: {**base.get(name, {}), **changes.get(name, {})} if isinstance(value, dict) else value
        for name, value in both.items()
    }


@pytest.mark.parametrize(("base", "changes"), CHANGES_PREDICTION, ids=lambda case: str(case))
def test_a_switch_changes_the_prediction(
    make_learner: MakeLearner, make_task: MakeTask, base: dict[str, Any], changes: dict[str, Any]
) -> None:
    """With equal values in all tensors that both have, one setting makes the difference."""
    usual, switched = make_learner(**base), make_learner(**merged(base, changes))
    task = make_task()
    assert (usual.predict(task) - switched.predict(task)).abs().max() > 1e-7


@pytest.mark.parametrize(
    ("base", "changes", "letters"),
    [
        ({"loss": MAML_LOSS}, {"outer": {"order": 1}}, {"theta", "omega", "psi"}),
        ({}, {"head": {"copy": "value"}}, {"theta"}),
    ],
)
def test_a_switch_changes_the_meta_gradient_alone(
    make_learner: MakeLearner,
    make_task: MakeTask,
    meta_gradient: MetaGradient,
    base: dict[str, Any],
    changes: dict[str, Any],
    letters: set[str],
) -> None:
    usual, switched = make_learner(**base), make_learner(**merged(base, changes))
    logits, gradient = learning(usual, make_task(), meta_gradient)
    other_logits, other_gradient = learning(switched, make_task(), meta_gradient)
    assert torch.equal(logits, other_logits)
    differ = {
        letter
        for letter, part in usual.groups().items()
        if any((gradient[name] - other_gradient[name]).abs().max() > 1e-7 for name in part)
    }
    assert differ == letters


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"inner": {"batch": "support"}}, ("inner.batch", "loss.transductive")),
        ({"film": {"refresh": "task"}}, ("film.refresh", "film.conditioning")),
        ({"inner": {"momentum": 0.0}}, ("inner.nesterov", "inner.momentum")),
        ({"warp": {"position": "before_addition"}}, ("warp.position", "conv4", "after_pool")),
        ({"backbone": "resnet12", "warp": {"position": "after_pool"}}, ("warp.position", "after_block")),
        ({"net": {"frozen_blocks": 4}}, ("net.frozen_blocks", "warp.kind")),
        (
            {"backbone": "resnet12", "net": {"widths": [3, 3, 3], "frozen_blocks": 3}},
            ("net.frozen_blocks", "warp.kind"),
        ),
        ({"loss": {"base": False, **MAML_LOSS}}, ("loss.base",)),
        ({"loss": {"share": True, "inductive": False}}, ("loss.share", "loss.inductive")),
        ({"loss": {"share": True, "transductive": False}}, ("loss.share", "loss.transductive")),
        (
            {"backbone": "resnet12", "net": {"widths": [3, 3], "frozen_blocks": 3}},
            ("net.frozen_blocks", "2 blocks"),
        ),
    ],
)
def test_impossible_combinations_are_refused_by_name(
    make_learner: MakeLearner, changes: dict[str, Any], names: tuple[str, ...]
) -> None:
    with pytest.raises(SettingError) as error:
        make_learner(**changes)
    assert all(name in str(error.value) for name in names)


@pytest.mark.parametrize("kind", ["fixed", "none"])
def test_a_wholly_frozen_encoder_adapts_the_head_alone(
    make_learner: MakeLearner, make_task: MakeTask, meta_gradient: MetaGradient, kind: str
) -> None:
    learner = make_learner(net={"frozen_blocks": 4}, warp={"kind": kind}, film={"enabled": False})
    assert list(learner.adapt(make_task())) == ["head.weight", "head.bias"]
    assert set(learner.groups()["theta"]) == {"head.weight", "head.bias"}
    assert meta_gradient(learner, [make_task()])["head.weight"].abs().max() > 0


def test_adapt_returns_every_adapted_tensor_by_name(make_learner: MakeLearner, make_task: MakeTask) -> None:
    learner, task = make_learner(backbone="resnet12", film={"adapt": True}), make_task()
    start, adapted = learner.start(3), learner.adapt(task)
    assert list(adapted) == list(start)
    units = [f"network.tail.blocks.0.units.{unit}." for unit in range(3)]
    assert set(adapted) == {
        "head.weight",
        "head.bias",
        "network.tail.blocks.0.shortcut.conv.weight",
        *(unit + "conv.weight" for unit in units),
        *(
            f"{part}film.generator.{name}"
            for part in (*units, "network.tail.blocks.0.warp.")
            for name in ("weight", "bias")
        ),
    }
    for name, tensor in adapted.items():
        assert tensor.shape == start[name].shape and not torch.equal(tensor, start[name])
    assert adapted["head.weight"].shape == (3, 4) and adapted["head.bias"].shape == (3,)


def test_adaptation_leaves_the_learner_alone(make_learner: MakeLearner, make_task: MakeTask) -> None:
    learner = make_learner()
    before = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
    one, other = learner.predict(make_task(1)), learner.predict(make_task(2))
    assert torch.equal(learner.predict(make_task(1)), one) and not torch.equal(one, other)
    learner.train()
    learner.meta_loss([make_task(1)]).backward()
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.state_dict().items())


def test_adaptation_lowers_its_loss_and_learns_the_task(make_learner: MakeLearner, make_task: MakeTask) -> None:
    learner = make_learner(loss=MAML_LOSS, inner={"steps": 30, "lr": 0.1}, film={"enabled": False})
    task = make_task(shots=5)
    prepared = learner.prepare(task)
    before = learner.inner_terms(learner.start(3), prepared)["base"]
    after = learner.inner_terms(learner.adapt(task), prepared)["base"]
    assert after < 0.2 * before


def test_predict_gives_a_row_for_each_query_and_a_column_for_each_class(
    make_learner: MakeLearner, make_task: MakeTask
) -> None:
    learner = make_learner()
    assert learner.predict(make_task(shots=1, queries=4)).shape == (12, 3)
    # One rule takes any number of shots, and the query labels do not matter.
    task = make_task(shots=3, queries=2)
    hidden = task._replace(query_labels=torch.zeros_like(task.query_labels))
    assert torch.equal(learner.predict(task), learner.predict(hidden))


def test_predict_can_be_told_the_final_batch(make_learner: MakeLearner, make_task: MakeTask) -> None:
    query, joint = make_learner(), make_learner(inner={"final_batch": "joint"})
    assert torch.equal(query.predict(make_task(), "joint"), joint.predict(make_task()))
    assert torch.equal(joint.predict(make_task(), "query"), query.predict(make_task()))


def test_a_temperature_divides_predictions_and_nothing_else(
    make_learner: MakeLearner, make_task: MakeTask
) -> None:
    usual, cooler, task = make_learner(), make_learner(head={"temperature": 2.5}), make_task()
    torch.testing.assert_close(cooler.predict(task), usual.predict(task) / 2.5, rtol=0, atol=1e-14)
    assert torch.equal(cooler.meta_loss([task]), usual.meta_loss([task]))
    adapted = cooler.adapt(task)
    assert all(torch.equal(tensor, adapted[name]) for name, tensor in usual.adapt(task).items())


def test_meta_loss_takes_a_list_of_tasks_or_a_batched_task(make_learner: MakeLearner, make_task: MakeTask) -> None:
    learner, tasks = make_learner(), [make_task(1), make_task(2)]
    loss = learner.meta_loss(tasks)
    assert loss.shape == () and torch.equal(loss, learner.meta_loss(stack_tasks(tasks)))
    assert torch.equal(loss, learner(tasks))
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in learner.parameters())


def test_tasks_of_unequal_size_are_refused(make_learner: MakeLearner, make_task: MakeTask) -> None:
    with pytest.raises(DataError, match="same size"):
        make_learner().meta_loss([make_task(), make_task(shots=3)])


@pytest.mark.parametrize("method", ["adapt", "predict"])
@pytest.mark.parametrize(
    ("changes", "part"),
    [({}, "learned loss"), ({"loss": MAML_LOSS, "head": {"kind": "linear"}}, "linear head")],
)
def test_another_number_of_classes_is_refused_with_both_numbers(
    make_learner: MakeLearner, make_task: MakeTask, method: str, changes: dict[str, Any], part: str
) -> None:
    with pytest.raises(DataError, match=rf"{part}.* 3 classes; the task has 4"):
        getattr(make_learner(**changes), method)(make_task(ways=4))


def test_a_rule_without_class_slots_takes_any_number_of_classes_above_one(
    make_learner: MakeLearner, make_task: MakeTask
) -> None:
    learner = make_learner(loss={"inductive": False, "transductive": False})
    assert learner.predict(make_task(ways=5)).shape == (10, 5)
    with pytest.raises(DataError, match="at least 2 classes; this one has 1"):
        learner.predict(make_task(ways=1))


def test_a_task_that_is_none_is_refused(make_learner: MakeLearner, make_task: MakeTask) -> None:
    learner, task = make_learner(), make_task()
    with pytest.raises(DataError, match=r"0 to ways - 1, not \[0, 1, 3\]"):
        learner.predict(task._replace(support_labels=torch.tensor([0, 0, 1, 1, 3, 3])))
    with pytest.raises(DataError, match=r"\[items, channels, height, width\].* not \[1, 6, 2, 32, 32\]"):
        learner.adapt(stack_tasks([task]))


@pytest.mark.parametrize("labels", [[0, 0, 1, 1, 2], [0, 0, 1, 1, 2, 2, 2]])
def test_as_many_labels_as_images_are_needed(
    make_learner: MakeLearner, make_task: MakeTask, labels: list[int]
) -> None:
    task = make_task()._replace(support_labels=torch.tensor(labels))
    with pytest.raises(DataError, match=f"{len(labels)}.*6|6.*{len(labels)}"):
        make_learner(loss=MAML_LOSS).predict(task)


def with_nan(images: Tensor) -> Tensor:
    return images.clone().index_fill_(0, torch.tensor([1]), float("nan"))


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "smaller": (lambda images: images[..., :16, :16], r"2 channels and 32x32 pixels, not \[2, 16, 16\]"),
    "one channel": (lambda images: images[:, :1], r"2 channels and 32x32 pixels, not \[1, 32, 32\]"),
    "NaN": (with_nan, "NaN"),
    "infinity": (lambda images: images / 0, "infinity"),
    "below 0": (lambda images: images - 1, "in 0 to 1"),
    "above 1": (lambda images: 255 * images, "in 0 to 1"),
    "whole numbers": (lambda images: (255 * images).long(), "uint8"),
    "none": (lambda images: images[:0], "at least one"),
}


@pytest.mark.parametrize("side", ["support", "query"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_image_of_the_learners_is_refused(
    make_learner: MakeLearner, make_task: MakeTask, case: str, side: str
) -> None:
    (change, words), name = REFUSED[case], f"{side}_images"
    learner, task = make_learner(), make_task()
    task = task._replace(**{name: change(getattr(task, name))})
    for refuses in (learner.adapt, learner.predict, lambda task: learner.meta_loss([task])):
        with pytest.raises(DataError, match=words):
            refuses(task)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_support_labels_are_whole_numbers(
    make_learner: MakeLearner, make_task: MakeTask, dtype: torch.dtype
) -> None:
    task = make_task()
    with pytest.raises(DataError, match="whole numbers"):
        make_learner().predict(task._replace(support_labels=task.support_labels.to(dtype)))


def test_bytes_are_the_floats_that_they_stand_for(make_learner: MakeLearner, make_task: MakeTask) -> None:
    learner, task = make_learner(), make_task()
    stored = task._replace(
        support_images=(255 * task.support_images).to(torch.uint8),
        query_images=(255 * task.query_images).to(torch.uint8),
    )
    scaled = stored._replace(
        support_images=stored.support_images.double() / 255, query_images=stored.query_images.double() / 255
    )
    torch.testing.assert_close(learner.predict(stored), learner.predict(scaled), rtol=0, atol=1e-12)
    assert (learner.predict(stored) - learner.predict(task)).abs().max() > 1e-7


@pytest.mark.parametrize("ways", [2, 4])
def test_meta_loss_refuses_another_number_of_classes(
    make_learner: MakeLearner, make_task: MakeTask, ways: int
) -> None:
    with pytest.raises(DataError, match=rf"3 classes; the task has {ways}"):
        make_learner().meta_loss([make_task(ways=ways)])


def test_tensors_have_the_names_of_version_0_1_in_files(make_learner: MakeLearner, make_task: MakeTask) -> None:
    loss = {"score_weight": 0.5, "adaptive_support": True, "adaptive_query": True}
    learner, other = (make_learner(seed=seed, loss=loss) for seed in (0, 1))
    kept, task = learner.state_dict(), make_task()
    begins = ("relation.", "loss.trust", "loss.adaptive.support.", "loss.adaptive.query.")
    assert all(any(name.startswith(begin) for name in kept) for begin in begins)
    assert not any(name.startswith("scorer.") or "score_weight" in name or "adaptive_" in name for name in kept)
    assert not torch.equal(learner.predict(task), other.predict(task))
    other.load_state_dict(kept)
    assert torch.equal(learner.predict(task), other.predict(task))
    assert list(learner.state_dict()) == list(kept)


def test_set_norms_follow_the_settings(make_learner: MakeLearner) -> None:
    for stem in ("batch", "running"):
        for tail in ("batch", "running"):
            network = make_learner(net={"stem_norm": stem, "tail_norm": tail}).network
            for side, mode in ((network.stem, stem), (network.tail, tail)):
                assert {part.mode for part in side.modules() if isinstance(part, Norm)} == {mode}


def test_a_fixed_warp_keeps_its_dirac_start_as_a_buffer(make_learner: MakeLearner) -> None:
    learner = make_learner(shaken=False, warp={"kind": "fixed"})
    omega = learner.network.tail.blocks[0].warp.omega
    assert not isinstance(omega, torch.nn.Parameter)
    assert torch.equal(omega, torch.nn.init.dirac_(torch.empty_like(omega)))
    assert any(name.endswith("warp.omega") for name in learner.state_dict())


def test_a_learner_is_fixed_by_its_seed_and_starts_as_the_paper_says(make_learner: MakeLearner) -> None:
    one, same, other = (make_learner(seed=seed, shaken=False).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    biases = [value for name, value in one.items() if name.endswith(("generator.bias", "head.bias", "s.0.bias"))]
    assert biases and all(bias.abs().max() == 0 for bias in biases)
    weights = [value.flatten() for name, value in one.items() if "generator.weight" in name or "layers" in name]
    assert torch.cat([w for w in weights if len(w) > 5]).std().item() == pytest.approx(0.01, rel=0.15)


def test_the_pretrained_encoder_is_taken_and_the_rules_parts_keep_their_start(
    make_learner: MakeLearner, make_task: MakeTask
) -> None:
    source = make_learner(seed=5, film={"enabled": False}, warp={"kind": "none"}).network.state_dict()
    learner = make_learner(shaken=False)
    omega = learner.network.tail.blocks[0].warp.omega.clone()
    learner.take_pretrained(source)
    state = learner.network.state_dict()
    assert all(torch.equal(state[name], value) for name, value in source.items())
    assert torch.equal(learner.network.tail.blocks[0].warp.omega, omega)
    with pytest.raises(RunError, match=r"stem\.blocks\.0"):
        learner.take_pretrained({})
    with pytest.raises(RunError, match="does not fit"):
        make_learner(net={"filters": 5}).take_pretrained(source)


def test_the_frozen_work_carries_no_gradient(make_learner: MakeLearner, make_task: MakeTask) -> None:
    prepared: Prepared = make_learner().prepare(make_task())
    assert not any(part.requires_grad for part in prepared)
    assert prepared.inner.shape[0] == 12 and prepared.final.shape[0] == 6
    assert prepared.labels.shape == (6, 3) and prepared.scores.shape == (6, 3)
    assert make_learner(loss={"transductive": False}).prepare(make_task()).scores.shape == (6, 0)


@pytest.mark.parametrize("rotations", [(0,), (0, 1, 2, 3)])
def test_scores_by_prototypes_come_from_the_encoder_as_it_was_pretrained(
    make_learner: Callable[..., Learner], make_task: Callable[..., Task], rotations: tuple[int, ...]
) -> None:
    scorer = {"kind": "prototypes", "temperature": 7.0, "rotations": len(rotations) > 1}
    learner = make_learner(scorer=scorer, warp={"kind": "none"})
    plain = encoder(learner.settings, learner.images, with_film=False, with_warp=False).double()
    with torch.no_grad():
        for name, tensor in plain.state_dict().items():
            noise = torch.rand(tensor.shape, generator=generator(1, name), dtype=torch.float64)
            tensor.copy_(0.5 + noise if name.endswith("var") else noise - 0.5)
    learner.take_pretrained(plain.state_dict())
    with torch.no_grad():  # what is meta-learned later does not touch the scores
        for parameter in learner.parameters():
            parameter.add_(0.1)
    task = make_task(0)
    images = normalised(learner, torch.cat([task.support_images, task.query_images]))
    set_norm(plain, "running")
    stem = learner.network.stem  # of each rotation by its own statistics
    embeddings = side_by_side([plain.tail(stem(images.rot90(quarters, (2, 3)))) for quarters in rotations])
    torch.testing.assert_close(learner.prepare(task).scores, by_cosines(embeddings, task), rtol=0, atol=1e-10)
    assert not any(name.startswith("scorer.") for name, _ in learner.named_parameters())


def side_by_side(embeddings: list[Tensor]) -> Tensor:
    return F.normalize(torch.cat([F.normalize(view, dim=1) for view in embeddings], 1), dim=1)


def by_cosines(embeddings: Tensor, task: Task) -> Tensor:
    """Scores from the embeddings, of length 1, of support and query; the temperature is 7."""
    support, query = embeddings.tensor_split([len(task.support_images)])
    centres = torch.stack([support[task.support_labels == label].mean(0) for label in range(3)])
    return torch.softmax(7.0 * query @ F.normalize(centres, dim=1).T, 1).detach()


@pytest.mark.parametrize("rotations", [(0,), (0, 1, 2, 3)])
def test_scores_by_an_encoder_of_their_own_do_not_depend_on_the_learners(
    make_learner: Callable[..., Learner], make_task: Callable[..., Task], rotations: tuple[int, ...]
) -> None:
    changes: dict[str, Any] = {"scorer": {"kind": "encoder", "temperature": 7.0, "rotations": len(rotations) > 1}}
    learner, task = make_learner(**changes), make_task(0)
    plain = encoder(scoring_encoder(learner.settings), learner.images, with_film=False, with_warp=False).double()
    assert [len(plain.stem.blocks), len(plain.tail.blocks)] == [1, 1]  # of scorer.widths
    with torch.no_grad():
        for name, tensor in plain.state_dict().items():
            noise = torch.rand(tensor.shape, generator=generator(1, name), dtype=torch.float64)
            tensor.copy_(0.5 + noise if name.endswith("var") else noise - 0.5)
    kept = {f"network.{name}": tensor for name, tensor in plain.state_dict().items()}
    learner.take_scorer(kept)
    set_norm(plain, "running")
    images = normalised(learner, torch.cat([task.support_images, task.query_images]))
    expected = by_cosines(side_by_side([plain(images.rot90(quarters, (2, 3))) for quarters in rotations]), task)
    torch.testing.assert_close(learner.prepare(task).scores, expected, rtol=0, atol=1e-10)
    assert not any(name.startswith("scorer.") for name, _ in learner.named_parameters())
    other = make_learner(**changes, seed=3, net={"stem_norm": "running"}, inner={"steps": 1})
    other.take_scorer(kept)
    torch.testing.assert_close(other.prepare(task).scores, expected, rtol=0, atol=1e-10)
